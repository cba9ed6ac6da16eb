"""Compose a config name and command-line overrides into one plain tree. Writes nothing to disk.

Hydra composes; its `compose` API is used rather than `@hydra.main`, which makes folders and moves
into them. A plain `key=value` also works for keys that the YAML does not mention.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mindspeed_rlxf.config.errors import ConfigError, Problem, closest, quote
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
    directories = _directories(config_dir)
    _check_name(config_name, directories)
    directories = _search_order(config_name, directories)
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
    """Return the problem that describes an error of hydra, omegaconf or the YAML parser.

    For a missing file of the defaults list, with the names there are; for bad YAML, with the line;
    for an override that cannot be parsed; else the error's own text.
    """
    name = f"config {config_name}"
    if isinstance(error, MissingConfigException):
        missing = str(error.missing_cfg_file or "")
        names = ", ".join(config_names(directories, str(Path(missing).parent))) or "none"
        return Problem(
            name,
            f"defaults name {missing}, which does not exist",
            remedy=f"there are: {names}",
            colon=True,
        )
    if isinstance(error, yaml.YAMLError):
        mark = getattr(error, "problem_mark", None)
        place = f"{mark.name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        return Problem(
            place,
            f"not valid YAML: {getattr(error, 'problem', None) or error}",
            remedy="correct that line" if mark else "correct it",
            colon=True,
        )
    if isinstance(error, OverrideParseException):
        return Problem(
            error.override.removeprefix("++"),
            "cannot be read",
            remedy="write key=value, and quotes around a value with unusual signs, as in "
            "key='\"a(b)\"'",
            colon=True,
        )
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return Problem(name, f"cannot be composed: {'; '.join(lines) or type(error).__name__}")


def _directories(config_dir: str | Path | None) -> list[Path]:
    """List the absolute folders to search for configs: `config_dir` if given, then the built-in.

    With `config_dir`, a built-in folder that does not exist is left out. `~` is expanded.
    Errors: ConfigError where `config_dir` is no folder.
    """
    builtin = builtin_config_dir()
    if config_dir is None:
        return [builtin]
    chosen = Path(os.path.abspath(os.path.expanduser(config_dir)))
    if not chosen.is_dir():
        raise ConfigError(
            Problem(f"--config-dir {config_dir}", "must be a folder", remedy="correct it")
        )
    return [chosen, builtin] if builtin.is_dir() else [chosen]


def _file_name(config_name: str) -> str:
    return config_name if config_name.endswith(".yaml") else f"{config_name}.yaml"


def _search_order(config_name: str, directories: list[Path]) -> list[Path]:
    """Return the folders (the user's if given, the built-in one), with the config's one first.

    Hydra requires that, and prefers files of the first folder. If both folders have the config, the
    user's is first; if none has it, the built-in one. A single folder must have it. ConfigError
    where the user's folder lacks the config, but has a file of a config group that the built-in
    folder has too: it would be ignored.
    """
    file = _file_name(config_name)
    if (directories[0] / file).is_file():
        return directories
    chosen, builtin = directories
    for part in sorted(chosen.glob("*/*.yaml")):
        name = part.relative_to(chosen)
        if (builtin / name).is_file():
            raise ConfigError(
                Problem(
                    f"--config-dir {chosen}",
                    f"{name} would be ignored, a built-in config uses the built-in one",
                    remedy=f"copy {builtin / file} there too",
                    colon=True,
                )
            )
    return [builtin, chosen]


def _check_name(config_name: str, directories: Sequence[Path]) -> None:
    """Raise ConfigError, with the most similar name and all names, unless the config exists.

    directories: the folders in which it may be
    """
    if any((directory / _file_name(config_name)).is_file() for directory in directories):
        return
    names = config_names(directories)
    guess = closest(config_name, names)
    rule = f"no such config in {' or '.join(map(str, directories))}"
    remedy = f"did you mean {guess}? " if guess else ""
    remedy += f"there are: {', '.join(names) or 'none'}"
    raise ConfigError(Problem(f"--config-name {config_name}", rule, remedy=remedy, colon=True))


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
