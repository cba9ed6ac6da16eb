"""Devices that are missing, as a run reports them."""

from typing import Any
from unittest.mock import Mock

import pytest

from mindspeed_rlxf.cluster.errors import DevicesMissing
from mindspeed_rlxf.cluster.nodes import Node


@pytest.fixture
def claim() -> Any:
    """The module. It imports Ray, which must not happen before a private cluster is started."""
    from mindspeed_rlxf.cluster.ray import node_tools

    return node_tools


def make_nodes(free: int) -> list[Node]:
    return [Node("id", "host", "10.0.0.1", count=2, free=free)]


def test_devices_of_removed_groups_count_as_free_in_a_report(
    claim: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray lists them as used for some time."""
    monkeypatch.setattr(
        claim, "live_nodes", Mock(side_effect=[make_nodes(2), *[make_nodes(0)] * 9])
    )
    monkeypatch.setattr(claim, "placement_group", Mock())
    monkeypatch.setattr(claim, "_remove", Mock())
    monkeypatch.setattr(claim, "_find_late_pools", lambda groups, _: list(groups))
    check = Mock(excluded=set(), check=list)
    with pytest.raises(DevicesMissing) as missing:
        claim.DeviceClaim("here", "lab", False, 0.0, check).reserve({"small": (2,), "big": (3,)})
    assert "2 of 2 free" in str(missing.value)
    assert "resource_pool.small" not in str(missing.value)


def test_a_pool_on_a_node_that_was_excluded_meanwhile_is_placed_again(
    claim: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {"here": {0: "a"}, "there": {0: "a", 1: "b"}}
    table = Mock(side_effect=lambda group: {"bundles_to_node_id": places[group]})
    monkeypatch.setattr(claim.ray.util, "placement_group_table", table)
    groups = {name: name for name in places}
    assert claim._find_pools_on(groups, {"b"}) == ["there"]
    assert claim._find_pools_on(groups, set()) == []
