"""Devices that are missing, as a run reports them."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from mindspeed_rlxf.cluster.errors import DevicesMissing
from mindspeed_rlxf.cluster.nodes import Node


@pytest.fixture
def claim() -> Any:
    """The module. It imports Ray, which must not happen before an own cluster is started."""
    from mindspeed_rlxf.cluster.ray import nodes

    return nodes


def make_nodes(free: int) -> list[Node]:
    return [Node("id", "host", "10.0.0.1", count=2, free=free)]


@pytest.mark.parametrize("frees", [[2, 2, 0, 0, 2], [2, 2, 0, 0, 0]], ids=["returned", "taken"])
def test_devices_of_removed_groups_are_awaited_before_a_report(
    claim: Any, monkeypatch: pytest.MonkeyPatch, frees: list[int]
) -> None:
    """Ray lists them as used for some time; another run may also have taken them."""
    left = list(frees)
    monkeypatch.setattr(
        claim, "live_nodes", lambda _: make_nodes(left.pop(0) if len(left) > 1 else left[0])
    )
    monkeypatch.setattr(claim, "placement_group", Mock())
    monkeypatch.setattr(claim, "_remove", Mock())
    monkeypatch.setattr(claim, "_find_late_pools", lambda groups, _: list(groups))
    monkeypatch.setattr(claim, "RETURN_S", 0.3)
    check = Mock(left_out=set(), check=list)
    with pytest.raises(DevicesMissing) as missing:
        claim.DeviceClaim("here", "lab", False, 0.0, check).reserve({"small": (2,), "big": (3,)})
    assert f"{frees[-1]} of 2 free" in str(missing.value)
    assert ("resource_pool.small" in str(missing.value)) == (frees[-1] == 0)


def test_a_pool_on_a_node_that_was_left_out_meanwhile_is_placed_again(
    claim: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {"here": {0: "a"}, "there": {0: "a", 1: "b"}}
    table = Mock(side_effect=lambda group: {"bundles_to_node_id": places[group]})
    monkeypatch.setattr(claim.ray.util, "placement_group_table", table)
    groups = {name: name for name in places}
    assert claim._find_pools_on(groups, {"b"}) == ["there"]
    assert claim._find_pools_on(groups, set()) == []
