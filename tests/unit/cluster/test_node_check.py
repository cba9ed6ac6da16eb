"""Nodes that do not answer, differ, or have sick devices are refused, or left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from mindspeed_rlxf.cluster.host_agent import Function, HostCall
from mindspeed_rlxf.cluster.installed import OURS, build
from mindspeed_rlxf.cluster.node_check import NodeCheck
from mindspeed_rlxf.cluster.node_report import NodeReport, report
from mindspeed_rlxf.cluster.nodes import Node
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.errors import UserError
from mindspeed_rlxf.device import driver
from tests.unit.cluster.agents import InProcess


class Reporter(InProcess):
    """The agent of a host that gives one of these reports."""

    def __init__(self, host: str, reports: Mapping[str, NodeReport]) -> None:
        super().__init__(host)
        self._reports = reports

    def start(self, function: Function, *args: Any, timeout_s: float) -> HostCall:
        assert function is report
        return super().start(reported, self._reports, self.host, timeout_s=timeout_s)


def reported(reports: Mapping[str, NodeReport], host: str) -> NodeReport:
    if host not in reports:
        raise ModuleNotFoundError("no answer")
    return reports[host]


NODES = [Node(name, name, f"10.0.0.{i}", 8, 8) for i, name in enumerate("abcde")]


def checked(probe: DeviceKind | None) -> tuple[Any, list[str]]:
    """The check, and the ids it lets pass: b does not answer, c has a sick device, d too few, e
    another build."""
    ours = dataclasses.replace(report([], None), devices=8)
    changes: dict[str, dict[str, Any]] = {
        "a": {}, "c": {"sick": ("device 3: Alarm",)}, "d": {"devices": 7},
        "e": {"versions": {**ours.versions, OURS: "0"}},
    }  # fmt: skip
    reports = {name: dataclasses.replace(ours, host=name, **changes[name]) for name in changes}
    check = NodeCheck(lambda node, host: Reporter(host, reports), {}, None, 1.0, probe)
    return check, [node.id for node in check.check(NODES)]


def test_bad_nodes_are_left_out_and_each_is_told(caplog: pytest.LogCaptureFixture) -> None:
    check, usable = checked(DeviceKind.NPU)
    assert usable == ["a"] and check.left_out == {"b", "c", "d", "e"}
    said = caplog.messages
    assert said[0].startswith("b (10.0.0.1) is left out: mindspeed_rlxf on b (10.0.0.1) must be ")
    assert f"({build()}): ModuleNotFoundError: no answer; install the same there" in said[0]
    assert said[1:3] == [
        "c (10.0.0.2) is left out: device 3: Alarm",
        "d (10.0.0.3) is left out: its driver lists 7 of 8 devices",
    ]
    assert "mindspeed_rlxf on e must be that of the driver" in said[3]
    assert check.check(NODES) == [NODES[0]] and len(caplog.messages) == 4  # told once


def test_without_leave_they_are_refused() -> None:
    with pytest.raises(UserError, match="no answer") as refused:
        checked(None)
    assert len(refused.value.problems) == 2  # b, and the build of e; devices were not asked for


def test_health_is_asked_of_the_drivers_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = tuple(driver.DriverDevice(i, "x", "OK" if i else "Alarm", 1, 0) for i in range(2))
    monkeypatch.setattr(driver, "driver_view", lambda kind: driver.DriverView("t", "1", devices))
    seen = report([], None, DeviceKind.NPU)
    assert (seen.devices, seen.sick) == (2, ("device 0: Alarm",))
    view = driver.DriverView("t", "", (), "no tool")
    monkeypatch.setattr(driver, "driver_view", lambda kind: view)
    assert report([], None, DeviceKind.NPU).devices is None
