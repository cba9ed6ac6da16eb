"""Every shipped and older configuration resolves to the values recorded before the schema changed.

Keys that were added since do not count, nor do keys of REMOVED.
"""

import json
from typing import Any

import pytest

from mindspeed_rlxf.compat.mindspeed_llm.translate import translate
from mindspeed_rlxf.config.keys import REMOVED
from mindspeed_rlxf.config.load import resolve
from tests.golden.resolved_configs import FOLDER, OLDER, SHIPPED, tree_of, values_of

CHANGED: dict[str, tuple[Any, Any]] = {
    "algorithm.kl_ctrl.target_kl": (6.0, 0.1)  # 6 is a figure of a whole sequence
}
"""Key -> (recorded, now): defaults that were changed on purpose, with the reason beside each."""


@pytest.mark.parametrize("name", [*SHIPPED, *OLDER])
def test_resolved_values_are_those_recorded(name: str) -> None:
    file = FOLDER / f"{name}.json"
    assert file.exists(), "record it: python -m tests.golden.resolved_configs"
    expected = flatten(json.loads(file.read_text(encoding="utf-8")))
    found = flatten(values_of(resolve(translate(tree_of(name)), name)))
    for key, (recorded, now) in CHANGED.items():
        if expected.get(key) == recorded:
            expected[key] = now
    gone = {key.replace("resource_pool.", "pool_settings.", 1) for key in REMOVED} | {*REMOVED}
    kept = {key: value for key, value in expected.items() if not is_in(key, gone)}
    assert {key: found.get(key, "missing") for key in kept} == kept


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return dotted keys and their values; an empty dict is a value."""
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    return {
        path: value
        for name, inner in tree.items()
        for path, value in flatten(inner, f"{prefix}.{name}" if prefix else name).items()
    }


def is_in(key: str, gone: set[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in gone)
