"""From a config name and command-line overrides to one plain tree. Nothing is written to disk.

Hydra composes; its `compose` API is used rather than `@hydra.main`, which makes folders and moves
into them. A plain `key=value` also works for keys that the YAML does not mention.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from mindspeed_rlxf.config.bounded_compose import checked_files, resolved
from mindspeed_rlxf.config.errors import ConfigError, Problem
from mindspeed_rlxf.config.quoting import quoted
from mindspeed_rlxf.config.suggest import closest
from mindspeed_rlxf.config.variables import withhold_interpolated

PACKAGE = Path(__file__).resolve().parents[1]


_REFUSED = (
    HydraException,
    OmegaConfBaseException,
    yaml.YAMLError,
    ValueError,
    OSError,
    RecursionError,
    MemoryError,
)


def builtin_config_dir() -> Path:
    """`configs/rlxf` of the clone, or the copy that was installed with the package."""
    clone = PACKAGE.parent / "configs" / "rlxf"
    return clone if clone.is_dir() else PACKAGE / "configs" / "rlxf"


def config_names(directories: Sequence[Path], group: str = "") -> list[str]:
    """Names that can be given without `.yaml`, over all directories."""
    files = [path for directory in directories for path in (directory / group).glob("*.yaml")]
    return sorted({path.stem for path in files})


def compose(
    config_name: str, overrides: Sequence[str] = (), config_dir: str | Path | None = None
) -> dict[str, Any]:
    """The tree of `config_name` with `overrides` applied and interpolations resolved.

    config_dir: searched before the built-in directory, whose model files stay in reach.
    Raises ConfigError for a name that is not there, bad YAML and overrides that make no sense.
    """
    directories = _directories(config_dir)
    _check_name(config_name, directories)
    directories = _holder_first(config_name, directories)
    search = ",".join(f"'file://{directory}'" for directory in directories[1:])
    edits = [_add_if_new(override, directories) for override in overrides]
    try:
        with warnings.catch_warnings(), checked_files(), _hydra(directories[0]):
            warnings.simplefilter("ignore", UserWarning)  # a defaults list without `_self_`
            config = hydra_compose(config_name, [*edits, f"hydra.searchpath=[{search}]"])
        found = resolved(config)
        assert isinstance(found, dict), "hydra composes a mapping"
        tree = {str(name): value for name, value in found.items()}
        withhold_interpolated(tree, config)
    except _REFUSED as error:
        raise ConfigError(_explain(error, config_name, directories)) from error
    return tree


def _explain(error: Exception, config_name: str, directories: Sequence[Path]) -> Problem:
    """What hydra, omegaconf or the YAML parser found wrong."""
    if isinstance(error, MissingConfigException):
        return _missing_part(config_name, error, directories)
    if isinstance(error, yaml.YAMLError):
        return _bad_yaml(config_name, error)
    if isinstance(error, OverrideParseException):
        return Problem(
            error.override.removeprefix("++"),
            "cannot be read",
            remedy="write key=value, and quotes around a value with unusual signs, as in "
            "key='\"a(b)\"'",
            colon=True,
        )
    if isinstance(error, RecursionError):
        return Problem(f"config {config_name}", "must not nest so deep", remedy="flatten it")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    found = "; ".join(lines) or type(error).__name__
    return Problem(f"config {config_name}", f"cannot be composed: {found}")


def _hydra(directory: Path) -> initialize_config_dir:
    return initialize_config_dir(str(directory), version_base="1.3")


def _directories(config_dir: str | Path | None) -> list[Path]:
    """Where configs are looked for, the first one first; absolute."""
    builtin = builtin_config_dir()
    if config_dir is None:
        return [builtin]
    chosen = Path(config_dir).expanduser().absolute()
    if not chosen.is_dir():
        raise ConfigError(
            Problem(f"--config-dir {config_dir}", "must be a folder", remedy="give one that exists")
        )
    return [chosen, builtin] if builtin.is_dir() else [chosen]


def _file_of(config_name: str) -> str:
    return config_name if config_name.endswith(".yaml") else f"{config_name}.yaml"


def _holder_first(config_name: str, directories: list[Path]) -> list[Path]:
    """Hydra takes the named config from the first folder only, and parts of configs from there
    before others: a part of that name in the chosen folder would be passed over.
    """
    file = _file_of(config_name)
    if (directories[0] / file).is_file():
        return directories
    chosen, builtin = directories
    for part in sorted(chosen.glob("*/*.yaml")):
        if (builtin / part.relative_to(chosen)).is_file():
            raise ConfigError(
                Problem(
                    f"--config-dir {chosen}",
                    f"{part.relative_to(chosen)} stands for the built-in one only beside a config "
                    "of that folder",
                    remedy=f"copy {builtin / file} there too",
                    colon=True,
                )
            )
    return [builtin, chosen]


def _check_name(config_name: str, directories: Sequence[Path]) -> None:
    if any((directory / _file_of(config_name)).is_file() for directory in directories):
        return
    names = config_names(directories)
    guess = closest(config_name, names)
    places = " or ".join(map(str, directories))
    remedy = f"did you mean {guess}? " if guess else ""
    remedy += f"there are: {', '.join(names) or 'none'}"
    raise ConfigError(
        Problem(
            f"--config-name {config_name}", f"no such config in {places}", remedy=remedy, colon=True
        )
    )


def _add_if_new(override: str, directories: Sequence[Path]) -> str:
    """`key=value` becomes `++key=value`, unless hydra's own sign or a config group leads it."""
    name, _, value = override.partition("=")
    is_group = any((directory / name).is_dir() for directory in directories) if name else False
    if override.startswith(("+", "~")) or "=" not in override or is_group:
        return override
    if not value.isascii() and value[0] not in "[{'\"":  # hydra's grammar is ASCII outside quotes
        value = quoted(value)
    return f"++{name}={value}"


def _missing_part(
    config_name: str, error: MissingConfigException, directories: Sequence[Path]
) -> Problem:
    missing = str(error.missing_cfg_file or "")
    group = str(Path(missing).parent)
    names = ", ".join(config_names(directories, group)) or "none"
    return Problem(
        f"config {config_name}",
        f"defaults name {missing}, which does not exist",
        remedy=f"there are: {names}",
        colon=True,
    )


def _bad_yaml(config_name: str, error: yaml.YAMLError) -> Problem:
    mark = getattr(error, "problem_mark", None)
    return Problem(
        f"{mark.name}:{mark.line + 1}:{mark.column + 1}" if mark else f"config {config_name}",
        f"not valid YAML: {getattr(error, 'problem', None) or error}",
        remedy="mend that line" if mark else "mend it",
        colon=True,
    )
