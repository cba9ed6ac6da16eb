"""Find the packages that this process would import, and their versions, without importing them.

A checkout on the path hides a wheel, and its version is in no metadata. The order in which Megatron
and a device's libraries are imported matters, so only their files are read here. This module is
light: every node of a cluster uses it before it imports torch.
"""

import importlib.util
import re
from importlib import metadata
from pathlib import Path

MEGATRON = "megatron-core"
NUMBERS = ("MAJOR", "MINOR", "PATCH")


def version(distribution: str) -> str | None:
    """Return the version that an import would find; None without the package or its version.

    distribution: as pip names it. Sources on the path come before an installed megatron-core or
    mindspeed, because they hide it.
    """
    return SOURCES.get(distribution, lambda: None)() or _installed(distribution)


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def folder_of(module: str) -> Path | None:
    """Return the folder that a package would be imported from; None if there is none.

    Imports its parent packages, not the package.
    """
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


def megatron_core() -> str | None:
    """Return the version in the files of the megatron-core that would be imported, else None."""
    values = _constants("megatron.core", "package_info.py")
    if not values.keys() >= {*NUMBERS}:
        return None
    return ".".join(values[name] for name in NUMBERS) + values.get("PRE_RELEASE", "")


def mindspeed() -> str | None:
    """Return the version in setup.py of a MindSpeed checkout on the path; None without one."""
    return _constants("mindspeed", "../setup.py").get("__version__")


SOURCES = {MEGATRON: megatron_core, "mindspeed": mindspeed}


def _constants(module: str, file: str) -> dict[str, str]:
    folder = folder_of(module)
    try:
        text = (folder.resolve() / file).read_text(encoding="utf-8") if folder else ""
    except OSError:
        return {}
    return dict(re.findall(r"""^(\w+) = ["']?([\w.+-]*)""", text, re.MULTILINE))
