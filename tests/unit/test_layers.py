"""Imports point downward only; each device library and Ray is imported by one package."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "mindspeed_rlxf"

# From the top down; packages of one line import each other only where SIDEWAYS says so.
LAYERS = [
    {"cli", "api"}, {"compat"}, {"ops"}, {"trainer"}, {"checkpoint"}, {"roles"}, {"cluster"},
    {"agents"},
    {"rollout"}, {"engine"}, {"rewards"}, {"weights"}, {"models"}, {"data"}, {"reporting"},
    {"algorithms"}, {"config", "device"},
]  # fmt: skip
HEIGHT = {name: -depth for depth, names in enumerate(LAYERS) for name in names}

# (importing module, imported module): `device` reads the device kinds, and the checks of a config
# ask the facade how many devices there are.
SIDEWAYS = {
    ("mindspeed_rlxf.device", "mindspeed_rlxf.config.enums"),
    ("mindspeed_rlxf.device.driver", "mindspeed_rlxf.config.enums"),
    ("mindspeed_rlxf.device.npu", "mindspeed_rlxf.config.enums"),
    ("mindspeed_rlxf.config.host_rules", "mindspeed_rlxf.device"),
    ("mindspeed_rlxf.device.npu_versions", "mindspeed_rlxf.config.packages"),
    ("mindspeed_rlxf.device.npu_versions", "mindspeed_rlxf.config"),
}
DEVICE_WORDS = re.compile(r"torch\.cuda|torch\.npu|torch_npu|nccl|hccl")


def modules(source: str, name: str, is_package: bool = False) -> Iterator[str]:
    """Every module that `source` (of the module `name`) imports, inside functions too.

    `from a import b` counts as `a` and `a.b`, so that no module hides behind its package.
    """
    parent = name if is_package else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = parent.rsplit(".", node.level - 1)[0]
                base = f"{above}.{base}" if base else above
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and "import_module" in ast.dump(node.func):
            # A name made at run time would escape this test; `device` picks kernels by name.
            argument = node.args[0]
            constant = isinstance(argument, ast.Constant)
            assert constant or f"{PACKAGE}.device." in name, f"{name} imports by a made-up name"
            yield from [str(argument.value)] if isinstance(argument, ast.Constant) else []


def package_files() -> dict[str, Path]:
    """Module name -> file, of the whole package."""
    found = {}
    for file in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


FILES = package_files()


@cache
def imports_of(name: str) -> frozenset[str]:
    file = FILES[name]
    is_package = file.name == "__init__.py"
    return frozenset(modules(file.read_text(encoding="utf-8"), name, is_package))


def layer(module: str) -> str | None:
    """The package below `mindspeed_rlxf` that a module is in; None for the top and for others."""
    parts = module.split(".")
    return parts[1] if parts[0] == PACKAGE and len(parts) > 1 else None


def points_up(importer: str, imported: str) -> bool:
    """Whether this import is of a higher or an equal layer, and not one of SIDEWAYS."""
    source, target = layer(importer), layer(imported)
    if target not in HEIGHT or source == target:
        return False  # another library, our own layer, or a name such as `__version__`
    if source is None:
        return True  # `mindspeed_rlxf/__init__.py` is under everything
    allowed = any(
        importer == a and (imported == b or imported.startswith(b + ".")) for a, b in SIDEWAYS
    )
    return HEIGHT[target] >= HEIGHT[source] and not allowed


def test_every_package_has_a_layer() -> None:
    assert {layer(name) for name in FILES} - {None} == set(HEIGHT)


def test_imports_point_down() -> None:
    pairs = [(name, imported) for name in FILES for imported in imports_of(name)]
    assert [pair for pair in pairs if points_up(*pair)] == []


def test_only_commands_and_the_library_import_what_serves_other_toolkits() -> None:
    outside = [name for name in FILES if layer(name) not in ("cli", "api", "compat")]
    users = [name for name in outside if any(layer(m) == "compat" for m in imports_of(name))]
    assert users == []


def test_no_imports_make_a_circle() -> None:
    graph = {name: {*imports_of(name)} & FILES.keys() for name in FILES}
    for name, found in graph.items():  # `from package import module` is no import of the package
        graph[name] = {m for m in found - {name} if not any(n.startswith(f"{m}.") for n in found)}
    TopologicalSorter(graph).prepare()


def test_algorithms_import_torch_and_words_of_the_configuration_only() -> None:
    words = ("enums", "estimator_traits", "registry")
    own = (f"{PACKAGE}.algorithms", *(f"{PACKAGE}.config.{module}" for module in words))
    names = [name for name in FILES if layer(name) == "algorithms"]
    imported = {module for name in names for module in imports_of(name)}
    assert {m for m in imported if layer(m) and not m.startswith(own)} == set()
    libraries = {m.split(".")[0] for m in imported} - {PACKAGE}
    assert libraries <= {"torch", "math", "dataclasses", "typing", "collections", "__future__"}


def test_only_cluster_ray_imports_ray() -> None:
    others = [name for name in FILES if not name.startswith(f"{PACKAGE}.cluster.ray.")]
    assert [n for n in others if "ray" in {m.split(".")[0] for m in imports_of(n)}] == []


def test_devices_are_named_in_the_facade_only() -> None:
    texts = [file.read_text(encoding="utf-8") for n, file in FILES.items() if layer(n) != "device"]
    lines = [line for text in texts for line in text.splitlines()]
    assert [line for line in lines if DEVICE_WORDS.search(line)] == []
