"""Find importable packages and their versions without importing them.

A checkout on the path hides a wheel, and no metadata has its version. Import order matters for
Megatron and device libraries, so this module only reads their files. It is light: every node in a
cluster uses it before importing torch.
"""

import importlib.util
import re
from importlib import metadata
from pathlib import Path

MEGATRON = "megatron-core"
NUMBERS = ("MAJOR", "MINOR", "PATCH")


def version(distribution: str) -> str | None:
    """Return the version behind an import; None without the package or its version.

    Args:
        distribution: pip's name. Sources on the path hide an installed megatron-core or mindspeed.
    """
    return SOURCES.get(distribution, lambda: None)() or _installed(distribution)


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def folder_of(module: str) -> Path | None:
    """Return a package's import folder, None if there is none.

    Imports its parent packages, not the package.
    """
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return Path(folders[0]) if folders else None


def megatron_core() -> str | None:
    """Return the version in the importable megatron-core's files, else None."""
    values = _constants("megatron.core", "package_info.py")
    if not values.keys() >= {*NUMBERS}:
        return None
    return ".".join(values[name] for name in NUMBERS) + values.get("PRE_RELEASE", "")


def mindspeed() -> str | None:
    """Return the version in a MindSpeed checkout's setup.py, None without one."""
    return _constants("mindspeed", "../setup.py").get("__version__")


SOURCES = {MEGATRON: megatron_core, "mindspeed": mindspeed}


def _constants(module: str, file: str) -> dict[str, str]:
    folder = folder_of(module)
    try:
        text = (folder.resolve() / file).read_text(encoding="utf-8") if folder else ""
    except OSError:
        return {}
    return dict(re.findall(r"""^(\w+) = ["']?([\w.+-]*)""", text, re.MULTILINE))
