"""Compose a config name and command-line overrides into one plain tree. Writes nothing to disk.

Hydra composes; its `compose` API is used rather than `@hydra.main`, which makes folders and moves
into them. A plain `key=value` also works for keys that the YAML does not mention.
"""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose, initialize_config_dir
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mindspeed_rlxf.config.problems import ConfigError, Problem, closest, quote
from mindspeed_rlxf.config.secrets import keep_interpolations

PACKAGE = Path(__file__).resolve().parents[1]
_REFUSED = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, OSError)


def builtin_config_dir() -> Path:
    """Return the folder `configs/rlxf` of a source checkout; if there is none, of the package."""
    clone = PACKAGE.parent / "configs" / "rlxf"
    return clone if clone.is_dir() else PACKAGE / "configs" / "rlxf"


def config_names(directories: Sequence[Path], group: str = "") -> list[str]:
    """List the names of the config files in all directories, sorted, each once, without `.yaml`.

    group: subfolder to look in; a directory without it counts as empty
    """
    files = [path for directory in directories for path in (directory / group).glob("*.yaml")]
    return sorted({path.stem for path in files})


def compose(
    config_name: str, overrides: Sequence[str] = (), config_dir: str | Path | None = None
) -> dict[str, Any]:
    """Return the tree of `config_name` with `overrides` applied and interpolations resolved.

    overrides:  in Hydra's grammar; `key=value` may also add a key that the YAML lacks
    config_dir: searched for the config before the built-in directory. Files that its defaults list
                names are searched first in the directory that has the config, then in the other
    Secrets that came from interpolations are wrapped, see `keep_interpolations`.
    Errors: ConfigError for an unknown name, a config_dir that is no folder, a file in it that the
    built-in directory would hide, bad YAML, and overrides or interpolations that cannot be applied.
    """
    directories = _directories(config_name, config_dir)
    search = ",".join(f"'file://{directory}'" for directory in directories[1:])
    edits = [_add_if_new(override, directories) for override in overrides]
    first = str(directories[0])
    try:
        with warnings.catch_warnings(), initialize_config_dir(first, version_base="1.3"):
            warnings.simplefilter("ignore", UserWarning)  # a defaults list without `_self_`
            config = hydra_compose(config_name, [*edits, f"hydra.searchpath=[{search}]"])
        plain: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        written: Any = OmegaConf.to_container(config, resolve=False)
        tree = keep_interpolations({str(name): value for name, value in plain.items()}, written)
    except _REFUSED as error:
        raise ConfigError(_explain(error, config_name, directories)) from error
    return tree


def _explain(error: Exception, config_name: str, directories: Sequence[Path]) -> Problem:
    """Return the problem that describes an error of hydra, omegaconf or the YAML parser."""
    name, remedy = f"config {config_name}", ""
    if isinstance(error, MissingConfigException):
        missing = str(error.missing_cfg_file or "")
        rule = f"defaults name {missing}, which does not exist"
        remedy = f"there are: {_list_names(directories, str(Path(missing).parent))}"
    elif isinstance(error, yaml.YAMLError):
        mark = getattr(error, "problem_mark", None)
        name = f"{mark.name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        rule = f"not valid YAML: {getattr(error, 'problem', None) or error}"
        remedy = "correct it"
    elif isinstance(error, OverrideParseException):
        name, rule = error.override.removeprefix("++"), "cannot be read"
        remedy = (
            "write key=value, and quotes around a value with unusual signs, as in key='\"a(b)\"'"
        )
    else:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return Problem(name, f"cannot be composed: {'; '.join(lines) or type(error).__name__}")
    return Problem(name, rule, remedy=remedy, colon=True)


def _list_names(directories: Sequence[Path], group: str = "") -> str:
    return ", ".join(config_names(directories, group)) or "none"


def _directories(config_name: str, config_dir: str | Path | None) -> list[Path]:
    """List the absolute folders to search: the one with the config first, as Hydra requires.

    They are `config_dir` if given, with `~` expanded, and the built-in one if it exists. If both
    have the config, the user's is first.
    Errors: ConfigError where `config_dir` is no folder, no folder has the config, or the built-in
    folder, coming first, would hide a file of a config group in the user's.
    """
    found = [builtin_config_dir()]
    if config_dir is not None:
        chosen = Path(os.path.abspath(os.path.expanduser(config_dir)))
        if not chosen.is_dir():
            name = f"--config-dir {config_dir}"
            raise ConfigError(Problem(name, "must be a folder", remedy="correct it"))
        found = [chosen, *(folder for folder in found if folder.is_dir())]
    file = config_name if config_name.endswith(".yaml") else f"{config_name}.yaml"
    with_config = [folder for folder in found if (folder / file).is_file()]
    if not with_config:
        guess = closest(config_name, config_names(found))
        rule = f"no such config in {' or '.join(map(str, found))}"
        remedy = f"did you mean {guess}? " if guess else ""
        remedy += f"there are: {_list_names(found)}"
        raise ConfigError(Problem(f"--config-name {config_name}", rule, remedy=remedy, colon=True))
    first = with_config[0]
    if first == found[0]:
        return found
    for part in sorted(found[0].glob("*/*.yaml")):
        hidden = part.relative_to(found[0])
        if (first / hidden).is_file():
            rule = f"{hidden} would be ignored, a built-in config uses the built-in one"
            remedy = f"copy {first / file} there too"
            raise ConfigError(Problem(f"--config-dir {found[0]}", rule, remedy=remedy, colon=True))
    return found[::-1]


def _add_if_new(override: str, directories: Sequence[Path]) -> str:
    """Return `key=value` as `++key=value`, which sets keys that the YAML lacks too.

    Unchanged: texts without "=", with a leading "+", "++" or "~", and choices of a config group (a
    folder `key` in one of the directories). A value with non-ASCII characters is put in quotes,
    unless it begins with a bracket, brace or quote.
    """
    name, _, value = override.partition("=")
    is_group = any((directory / name).is_dir() for directory in directories) if name else False
    if override.startswith(("+", "~")) or "=" not in override or is_group:
        return override
    if not value.isascii() and value[0] not in "[{'\"":  # hydra's grammar is ASCII outside quotes
        value = quote(value)
    return f"++{name}={value}"
