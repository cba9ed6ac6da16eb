"""Compose a config name and command-line overrides into one plain tree. Writes nothing to disk.

Uses Hydra's `compose` API, because `@hydra.main` makes folders and moves into them. A plain
`key=value` also works for keys missing in the YAML, and a mapping replaces the YAML's whole.
"""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose, initialize_config_dir
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mindspeed_rlxf.config.problems import ConfigError, Problem, closest, quote
from mindspeed_rlxf.config.secrets import keep_interpolations


def builtin_config_dir() -> Path:
    """Return the folder `configs/rlxf` in a source checkout, else in the package."""
    package = Path(__file__).resolve().parents[1]
    clone = package.parent / "configs" / "rlxf"
    return clone if clone.is_dir() else package / "configs" / "rlxf"


def config_names(directories: Sequence[Path], group: str = "") -> list[str]:
    """List config files by name without `.yaml`, sorted, each once.

    Args:
        directories: Folders to search.
        group: Subfolder to look in.
    """
    names: set[str] = set()
    for directory in directories:
        names.update(path.stem for path in (directory / group).glob("*.yaml"))
    return sorted(names)


def compose(
    config_name: str, overrides: Sequence[str] = (), config_dir: str | Path | None = None
) -> dict[str, Any]:
    """Return the tree for `config_name` with `overrides` applied and interpolations resolved.

    Wraps secrets written as interpolations, see `keep_interpolations`.

    Args:
        config_name: File name, with or without `.yaml`.
        overrides: In Hydra's grammar; `key=value` may also add a key, and `key={...}` replaces the
            mapping of the YAML, where Hydra would merge both.
        config_dir: Searched before the built-in directory; must hide no file behind a built-in
            config.

    Raises:
        ConfigError: Unknown name or folder, bad YAML, or overrides or interpolations cannot be
            applied.
    """
    folders = [builtin_config_dir()]
    if config_dir is not None:
        folders.insert(0, Path(os.path.abspath(os.path.expanduser(config_dir))))
        if not folders[0].is_dir():
            name = f"--config-dir {config_dir}"
            raise ConfigError(Problem(name, "must be a folder", remedy="correct it"))
    file = f"{config_name.removesuffix('.yaml')}.yaml"
    user_folder = folders[0]
    # Hydra wants the folder that has the config first.
    folders.sort(key=lambda folder: not (folder / file).is_file())
    if not (folders[0] / file).is_file():
        names = config_names(folders)
        guess = closest(config_name, names)
        rule = f"no such config in {' or '.join(map(str, folders))}"
        remedy = f"{f'did you mean {guess}? ' if guess else ''}there are: {', '.join(names)}"
        raise ConfigError(Problem(f"--config-name {config_name}", rule, remedy=remedy, colon=True))
    for path in user_folder.glob("*/*.yaml") if user_folder != folders[0] else ():
        group_file = path.relative_to(user_folder)
        if (folders[0] / group_file).is_file():
            name = f"--config-dir {user_folder}"
            rule = f"{group_file} would be ignored, a built-in config uses its own"
            remedy = f"copy {folders[0] / file} there too"
            raise ConfigError(Problem(name, rule, remedy=remedy, colon=True))
    edits = [_add_if_new(override, folders) for override in overrides]
    edits.append(f"hydra.searchpath=['file://{folders[-1]}']")
    try:
        with warnings.catch_warnings(), initialize_config_dir(str(folders[0]), version_base="1.3"):
            warnings.simplefilter("ignore", UserWarning)  # a defaults list without `_self_`
            if any("={" in edit for edit in edits):
                before = hydra_compose(config_name, edits[-1:])
                edits = _replace_mappings(edits, before)
            config = hydra_compose(config_name, edits)
        plain: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        written: Any = OmegaConf.to_container(config, resolve=False)
        return keep_interpolations({str(name): value for name, value in plain.items()}, written)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, OSError) as error:
        raise ConfigError(explain(error, config_name, folders)) from error


def explain(error: Exception, config_name: str, folders: Sequence[Path]) -> Problem:
    """Return the problem behind an error from hydra, omegaconf or the YAML parser."""
    name = f"config {config_name}"
    if isinstance(error, MissingConfigException):
        missing = str(error.missing_cfg_file or "")
        rule = f"defaults name {missing}, which does not exist"
        remedy = f"there are: {', '.join(config_names(folders, str(Path(missing).parent)))}"
        return Problem(name, rule, remedy=remedy, colon=True)
    if isinstance(error, yaml.YAMLError):
        mark = getattr(error, "problem_mark", None)
        name = f"{mark.name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        rule = f"not valid YAML: {getattr(error, 'problem', None) or error}"
        return Problem(name, rule, remedy="correct it", colon=True)
    if isinstance(error, OverrideParseException):
        remedy = "write key=value, and quote a value of unusual signs, as in key='\"a(b)\"'"
        name = error.override.removeprefix("++")
        return Problem(name, "cannot be read", remedy=remedy, colon=True)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return Problem(name, f"cannot be composed: {'; '.join(lines) or type(error).__name__}")


def _replace_mappings(edits: Sequence[str], before: DictConfig) -> list[str]:
    """Delete each mapping that exists `before`, in front of the edit that gives it anew."""
    replacing: list[str] = []
    for edit in edits:
        name, _, value = edit.removeprefix("++").partition("=")
        if value.startswith("{") and OmegaConf.is_dict(OmegaConf.select(before, name)):
            replacing.append(f"~{name}")
        replacing.append(edit)
    return replacing


def _add_if_new(override: str, folders: Sequence[Path]) -> str:
    # `++` sets keys that the YAML lacks too. Choices of a config group (a folder) stay.
    name, equals, value = override.partition("=")
    is_group = bool(name) and any((folder / name).is_dir() for folder in folders)
    if override.startswith(("+", "~")) or not equals or is_group:
        return override
    if not value.isascii() and value[0] not in "[{'\"":  # hydra's grammar is ASCII outside quotes
        value = quote(value)
    return f"++{name}={value}"
