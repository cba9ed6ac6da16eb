"""Code outside `rollout/` does not depend on how responses are generated."""

import ast

from tests.unit.test_layers import FILES, PACKAGE, imports_of, layer

ROLLOUT = f"{PACKAGE}.rollout"
# What others may know: the interface, forms of it, their names and how one is built, the size of
# the buckets of weights, the sizes of a server, and the files of responses in a checkpoint.
BORDER = {"rollout_engine", "sampling", "replica", "transfer", "server_sizes", "ahead"}
GENERATING = (f"{PACKAGE}.roles.rollout",)
INSIDE = {
    "NativeRollout",
    "TransformersRollout",
    "KvCache",
    "SharedWeights",
    "OwnWeights",
    "build_rollout_module",
}


def text_of(module: str) -> str:
    return FILES[module].read_text(encoding="utf-8")


def names_of(module: str) -> set[str]:
    """Every name and attribute that a module uses."""
    nodes = list(ast.walk(ast.parse(text_of(module))))
    found = {node.id for node in nodes if isinstance(node, ast.Name)}
    return found | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def test_other_packages_import_only_the_border_modules_of_the_rollout() -> None:
    outside = [name for name in FILES if layer(name) != "rollout"]
    users = [name for name in outside if ROLLOUT in text_of(name)]
    assert f"{PACKAGE}.roles.rollout" in users
    for name in users:
        imported = {m.split(".")[2] for m in imports_of(name) if m.startswith(ROLLOUT + ".")}
        assert imported <= BORDER, f"{name} imports {sorted(imported - BORDER)} of the rollout"
    for name in (name for name in outside if any(word in text_of(name) for word in INSIDE)):
        assert not names_of(name) & INSIDE, name


def test_the_roles_that_generate_know_no_model() -> None:
    models = f"{PACKAGE}.models", f"{PACKAGE}.engine", "megatron"
    for name in GENERATING:
        assert not [module for module in imports_of(name) if module.startswith(models)], name
        assert "TransformerModel" not in names_of(name), name
