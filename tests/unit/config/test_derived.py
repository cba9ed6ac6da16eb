"""Values that follow from other keys."""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed_rlxf.config.resolve import resolve, resolve_with_notes


@pytest.mark.parametrize(
    ("size", "device", "nodes"),
    [
        (2, {}, [2]),
        (8, {}, [8]),
        (16, {}, [8, 8]),
        (16, {"device.devices_per_node": 16}, [16]),
        (4, {"device.devices_per_node": 2}, [2, 2]),
        ([4, 4], {"device.devices_per_node": 2}, [4, 4]),
    ],
)
def test_a_count_beyond_one_host_fills_whole_hosts(
    make_tree: Any, size: Any, device: dict[str, int], nodes: list[int]
) -> None:
    changes = {"resource_pool.main": size, "runtime.address": "head:6379", **device}
    assert resolve(make_tree(changes), "test").resource_pool == {"main": nodes}


def test_a_count_that_leaves_a_host_half_empty_is_refused(problems: Any) -> None:
    assert problems({"resource_pool.main": 12, "runtime.address": "head:6379"}) == [
        "resource_pool.main=12 must fill whole hosts of 8 devices (device.devices_per_node); "
        "use 8 or 16, or give a list with a number per host"
    ]


def test_on_this_host_a_count_is_a_count(make_tree: Any) -> None:
    tree = make_tree({"resource_pool.main": 16})
    assert resolve(tree, "test").resource_pool == {"main": [16]}


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        (
            {"resource_pool.spare": []},
            "resource_pool.spare=[]: no role uses it, as it has no devices",
        ),
        (
            {"resource_pool.judge": 1, "placement.reward": "judge"},
            "resource_pool.judge: no role computes on its devices, as a rule needs none "
            "(reward.kind=rule)",
        ),
        (
            {"resource_pool.judge": 1, "placement.reward": "judge", "reward.kind": "model"},
            None,
        ),
        ({}, None),
    ],
)
def test_a_pool_that_no_role_computes_on_is_noted(
    make_tree: Any, changes: dict[str, Any], note: str | None
) -> None:
    _, notes = resolve_with_notes(make_tree(changes), "t")
    assert [text for text in notes if text.startswith("resource_pool")] == ([note] if note else [])
