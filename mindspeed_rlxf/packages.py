"""What this process would import, and in which version: asked of files, imports nothing.

A checkout on the path hides a wheel, and its version stands in no metadata. The order in which
Megatron and a device's libraries are imported matters, so they are only looked at here. Light:
every node of a cluster reads this before it imports torch.
"""

from __future__ import annotations

import ast
import importlib.util
from importlib import metadata
from pathlib import Path

MEGATRON = "megatron-core"
NUMBERS = ("MAJOR", "MINOR", "PATCH")
SUFFIX = "PRE_RELEASE"


def version(distribution: str) -> str | None:
    """Of what would be imported; None where there is none, or where it has no version."""
    of_sources = SOURCES.get(distribution)
    return (of_sources() if of_sources else None) or _installed(distribution)


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def folder_of(module: str) -> Path | None:
    """Where a package would be imported from; imports its parents only, which here hold no code."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


def megatron_core() -> str | None:
    """Version of the sources on the path, not of a wheel that they hide."""
    folder = folder_of("megatron.core")
    values = _constants(folder / "package_info.py") if folder else {}
    if not values.keys() >= set(NUMBERS):
        return None
    return ".".join(values[name] for name in NUMBERS) + values.get(SUFFIX, "")


def mindspeed() -> str | None:
    """Version of a checkout on the path, which its setup.py alone tells."""
    folder = folder_of("mindspeed")
    return _constants(folder.resolve().parent / "setup.py").get("__version__") if folder else None


SOURCES = {MEGATRON: megatron_core, "mindspeed": mindspeed}


def _constants(file: Path) -> dict[str, str]:
    """Of a Python file's top level, by name; none where it cannot be read."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return {}
    return {
        target.id: str(node.value.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
