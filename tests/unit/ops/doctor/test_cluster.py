"""Differences between hosts are reported with the hosts that differ from most."""

from __future__ import annotations

import time
from typing import Any

import pytest

from mindspeed_rlxf.cluster.host_agent import Function, HostCall
from mindspeed_rlxf.cluster.nodes import Node
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.errors import UserError
from mindspeed_rlxf.ops.doctor import cluster
from mindspeed_rlxf.ops.doctor.cluster import (
    check_cluster,
    clock_findings,
    clock_offsets,
    version_findings,
    versions,
)
from mindspeed_rlxf.ops.doctor.subject import Subject
from tests.unit.cluster.agents import InProcess


def test_hosts_with_another_version_are_named() -> None:
    usual = {"mindspeed_rlxf": "0.1.0, sources a", "torch": "2.7.1"}
    by_host = {f"h{i}": usual for i in range(5)}
    by_host["h2"] = {**usual, "torch": "2.6.0"}
    by_host["h4"] = {**usual, "mindspeed_rlxf": "0.1.0, sources b"}
    found = [(f.status.value, f.value, f.hosts) for f in version_findings(by_host)]
    assert found == [
        (
            "error",
            "mindspeed_rlxf 0.1.0, sources b, on 4 other hosts 0.1.0, sources a",
            ("h4",),
        ),
        ("error", "torch 2.6.0, on 4 other hosts 2.7.1", ("h2",)),
    ]
    built_alone = {**usual, "torch": "2.7.1+cpu"}  # a head without devices, as a run allows
    assert [f.status.value for f in version_findings({"h0": usual, "h1": built_alone})] == ["ok"]


def test_clocks_that_are_off_and_hosts_that_fall_silent_are_named() -> None:
    found = clock_findings({"a": 0.2, "b": -3.25, "c": None})
    assert [(f.status.value, f.value, f.hosts) for f in found] == [
        ("warning", "3.2 s behind", ("b",)),
        ("warning", "answered first, but not later", ("c",)),
    ]
    assert [f.value for f in clock_findings({"a": 0.2})] == ["within 1 s on 1 hosts"]


class Ahead(InProcess):
    """A host whose clock is ahead, and whose reply takes a while. Counts those under way."""

    under_way, most = 0, 0

    def __init__(self, host: str, offset: float, reply_s: float) -> None:
        super().__init__(host)
        self._offset, self._reply_s = offset, reply_s

    def start(self, function: Function, *args: Any, timeout_s: float) -> HostCall:
        assert function is time.time
        return super().start(self.reply, timeout_s=timeout_s)

    def reply(self) -> float:
        """The clock is read half way."""
        Ahead.under_way += 1
        Ahead.most = max(Ahead.most, Ahead.under_way)
        time.sleep(self._reply_s / 2)
        found = time.time() + self._offset
        time.sleep(self._reply_s / 2)
        Ahead.under_way -= 1
        return found


def test_all_hosts_are_asked_for_their_clocks_at_the_same_time() -> None:
    hosts = [Ahead("a", -30.0, 0.2), Ahead("b", 30.0, 0.2)]
    hosts += [Ahead(f"silent-{i}", 0.0, 60.0) for i in range(30)]
    started = time.monotonic()
    found = clock_offsets(hosts, 1.0)
    assert time.monotonic() - started < 20 and Ahead.most == len(hosts)
    # The 0.1 s before the reading are not sure of 30 s behind, the 0.1 s after it of 30 s ahead.
    # A busy machine makes both waits longer, so less is sure.
    behind, ahead = found.pop("a"), found.pop("b")
    assert behind is not None and -29.91 < behind < -20.0
    assert ahead is not None and 20.0 < ahead < 29.91
    assert set(found.values()) == {None}


class Examined(InProcess):
    """A host of the doctor. state: works, broken (nothing of ours starts there), silent, or silent
    once it has been examined."""

    def __init__(self, host: str, state: str) -> None:
        super().__init__(host)
        self.state, self.asked = state, 0

    def start(self, function: Function, *args: Any, timeout_s: float) -> HostCall:
        self.asked += 1
        return super().start(self.answer, function, timeout_s=timeout_s)

    def answer(self, function: Function) -> Any:
        if self.state == "broken":
            raise ModuleNotFoundError("No module named 'mindspeed_rlxf'")
        if self.state == "silent" or (self.state == "late" and function is time.time):
            time.sleep(60.0)
        return time.time() if function is time.time else ([], {"torch": "2.7.1"})


class Agents:
    """Stands for the agents of a cluster."""

    def __init__(self, hosts: list[Examined]) -> None:
        self._hosts, self.ended = {host.host: host for host in hosts}, False

    def on(self, node: str, host: str) -> Examined:
        return self._hosts[host]

    def end(self) -> None:
        self.ended = True


def examined(monkeypatch: pytest.MonkeyPatch, left_s: float, **states: str) -> list[Any]:
    """Findings with so many seconds left of the deadline, by host and state."""
    from mindspeed_rlxf.cluster.ray import agent as ray_agent

    hosts = [Examined(host, state) for host, state in states.items()]
    agents = Agents(hosts)
    nodes = [Node(host, host, f"10.0.0.{i}", 0, 0) for i, host in enumerate(states)]
    monkeypatch.setattr(ray_agent, "live_nodes", lambda resource: nodes)
    monkeypatch.setattr(ray_agent, "RayAgents", lambda environment: agents)
    monkeypatch.setattr(cluster, "_collectives", lambda subject, answered, *rest: [])
    started = time.monotonic()
    found = cluster._check_joined(Subject(DeviceKind.CPU, "/x"), started + left_s)
    assert agents.ended and time.monotonic() - started < left_s + 20
    gone = {host.host for host in hosts if host.state in ("broken", "silent")}
    assert {host.host: host.asked for host in hosts} == {h: 1 if h in gone else 2 for h in states}
    return found


def test_hosts_that_do_not_answer_are_named_with_the_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = examined(monkeypatch, 1.5, a="works", b="broken", c="silent")
    by_host = {f.hosts: f.value for f in found if f.check == "cluster.host"}
    assert by_host == {
        ("b",): "ModuleNotFoundError: No module named 'mindspeed_rlxf'",
        ("c",): "no reply within 0.5 s, waiting for the function to return",
    }
    values = {f.check: f.value for f in found if f.status.value == "ok"}
    assert values["cluster.hosts"] == "1 of 3 hosts answered"
    assert values["cluster.versions"] == "the same on 1 hosts"


def test_clocks_are_not_waited_for_beyond_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    found = examined(monkeypatch, 1.5, a="works", b="late")
    (clock,) = [f for f in found if f.check == "cluster.clock"]
    assert (clock.value, clock.hosts) == ("answered first, but not later", ("b",))


def test_versions_name_this_package_and_python() -> None:
    assert {"mindspeed_rlxf", "python", "torch", "cann"} <= versions().keys()


def test_without_a_cluster_the_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(UserError, match="--cluster needs a Ray cluster and none is named"):
        check_cluster(Subject(DeviceKind.CPU, "/x"), None, 60.0)


def test_a_cluster_of_another_version_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: str, resources: dict[str, float], allow: bool) -> None:
        raise RuntimeError("Version mismatch:\n the cluster runs Ray 2.9")

    monkeypatch.setattr("mindspeed_rlxf.ops.doctor.cluster.open_cluster", refuse)
    (found,) = check_cluster(Subject(DeviceKind.CPU, "/x"), "127.0.0.1:6379", 60.0)
    assert found.status.value == "error" and "Version mismatch: the cluster" in found.value
