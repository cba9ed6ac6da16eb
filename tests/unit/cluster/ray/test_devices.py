"""Nodes that do not answer or differ are refused or excluded, and missing devices reported."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import Mock

import pytest

from mindspeed_rlxf.cluster.errors import DevicesMissing
from mindspeed_rlxf.cluster.nodes import OURS, Node, NodeReport, build_id, report_node
from mindspeed_rlxf.config.problems import UserError

NODES = [Node(name, name, f"10.0.0.{i}", 8, 8) for i, name in enumerate("abc")]


@pytest.fixture
def tools() -> Any:
    """The module. It imports Ray, which must not happen before a private cluster is started."""
    from mindspeed_rlxf.cluster.ray import node_tools

    return node_tools


def test_devices_of_removed_groups_count_as_free_in_a_report(tools, monkeypatch):
    """Ray lists them as used for some time."""
    nodes = [[Node("id", "host", "10.0.0.1", count=2, free=free)] for free in (2, *[0] * 9)]
    monkeypatch.setattr(tools, "live_nodes", Mock(side_effect=nodes))
    monkeypatch.setattr(tools, "placement_group", Mock())
    monkeypatch.setattr(tools.ray.util, "remove_placement_group", Mock())
    monkeypatch.setattr(tools, "_find_late_pools", lambda groups, _: ["big"])
    claim = tools.DeviceClaim("here", "lab", False, 0.0, {}, None, 1.0, False)
    monkeypatch.setattr(claim, "check", list)
    with pytest.raises(DevicesMissing) as missing:
        claim.reserve({"small": (2,), "big": (3,)})
    assert "2 of 2 free" in str(missing.value)
    assert "resource_pool.small" not in str(missing.value)


def make_claim(
    tools: Any, monkeypatch: pytest.MonkeyPatch, excludes: bool, reports: Mapping[str, NodeReport]
) -> Any:
    """A claim on nodes that give these reports; others do not answer."""
    silent = tools.Failed("ModuleNotFoundError: no answer")

    def run(tasks: Sequence[Any], *_: Any) -> list[Any]:
        return [reports.get(task.node, silent) for task in tasks]

    monkeypatch.setattr(tools, "run_tasks", run)
    return tools.DeviceClaim("here", "lab", False, 0.0, {}, None, 1.0, excludes)


def make_reports() -> dict[str, NodeReport]:
    """a is as the driver, b does not answer, c has another build."""
    ours = report_node([], None)
    other = {**ours.versions, OURS: "0"}
    return {
        "a": dataclasses.replace(ours, host="a"),
        "c": dataclasses.replace(ours, host="c", versions=other),
    }


def test_bad_nodes_are_excluded_and_each_is_reported_once(tools, monkeypatch, caplog):
    reports = make_reports()
    claim = make_claim(tools, monkeypatch, True, reports)
    assert claim.check(NODES) == NODES[:1] and claim.excluded == {"b", "c"}
    silent, differs = caplog.messages
    assert silent.startswith("b (10.0.0.1) is excluded: mindspeed_rlxf on b (10.0.0.1) must be ")
    assert f"({build_id()}): ModuleNotFoundError: no answer; install the same there" in silent
    assert "mindspeed_rlxf on c must be that of the driver" in differs
    assert claim.check(NODES) == NODES[:1] and len(caplog.messages) == 2
    reports["c"] = dataclasses.replace(reports["a"], host="c")  # installed, Ray started again
    again = dataclasses.replace(NODES[2], id="c")
    claim = make_claim(tools, monkeypatch, True, reports)
    assert claim.check([NODES[0], again]) == [NODES[0], again]


def test_bad_nodes_are_refused_by_default(tools, monkeypatch):
    with pytest.raises(UserError, match="no answer") as refused:
        make_claim(tools, monkeypatch, False, make_reports()).check(NODES)
    assert len(refused.value.problems) == 2
