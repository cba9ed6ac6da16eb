"""What differs between hosts is told with the hosts that differ from most."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.errors import UserError
from mindspeed_rlxf.doctor import cluster
from mindspeed_rlxf.doctor.cluster import clock_findings, drift, look, versions
from mindspeed_rlxf.doctor.subject import Subject


def test_hosts_with_another_version_are_named() -> None:
    usual = {"mindspeed_rlxf": "0.1.0, sources a", "torch": "2.7.1"}
    by_host = {f"h{i}": usual for i in range(5)}
    by_host["h2"] = {**usual, "torch": "2.6.0"}
    by_host["h4"] = {**usual, "mindspeed_rlxf": "0.1.0, sources b"}
    found = [(f.status.value, f.value, f.hosts) for f in drift(by_host)]
    assert found == [
        (
            "error",
            "mindspeed_rlxf 0.1.0, sources b, on 4 other hosts 0.1.0, sources a",
            ("h4",),
        ),
        ("error", "torch 2.6.0, on 4 other hosts 2.7.1", ("h2",)),
    ]
    assert [f.status.value for f in drift({"h0": usual, "h1": usual})] == ["ok"]


def test_clocks_that_are_off_and_hosts_that_fall_silent_are_named() -> None:
    found = clock_findings({"a": 0.2, "b": -3.25, "c": None})
    assert [(f.status.value, f.value, f.hosts) for f in found] == [
        ("warning", "3.2 s behind", ("b",)),
        ("warning", "answered once, and then no more", ("c",)),
    ]
    assert [f.value for f in clock_findings({"a": 0.2})] == ["within 1 s on 1 hosts"]


@dataclasses.dataclass
class Hosts:
    """Stand-ins for Ray and its hosts, on a clock of their own.

    ahead: seconds that the clock of each host that replies is ahead, and when its reply comes
    """

    ahead: dict[str, tuple[float, float]]
    clock: float = 1000.0

    def time(self) -> float:
        return self.clock

    monotonic = time

    def process(self, node: SimpleNamespace, options: object) -> SimpleNamespace:
        return SimpleNamespace(
            node=node,
            call=lambda function, *args: ((node.name, self.clock), None),
            end=lambda: None,
        )

    def wait(
        self, refs: list[tuple[str, float]], num_returns: int, timeout: float
    ) -> tuple[list[tuple[str, float]], list[tuple[str, float]]]:
        comes = {ref: ref[1] + self.ahead[ref[0]][1] for ref in refs if ref[0] in self.ahead}
        ready = sorted(comes, key=lambda ref: comes[ref])[:num_returns]
        ready = [ref for ref in ready if comes[ref] <= self.clock + timeout]
        done = comes[ready[-1]] if len(ready) == num_returns else self.clock + timeout
        self.clock = max(self.clock, done)
        return ready, [ref for ref in refs if ref not in ready]

    def get(self, ref: tuple[str, float]) -> float:
        offset, reply_s = self.ahead[ref[0]]
        return ref[1] + reply_s / 2 + offset


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Hosts:
    from mindspeed_rlxf.runtime import ray_survey

    hosts = Hosts({})
    monkeypatch.setattr(ray_survey, "ray", hosts)
    monkeypatch.setattr(ray_survey, "time", hosts)
    monkeypatch.setattr(cluster, "time", hosts)
    monkeypatch.setattr(ray_survey, "start", hosts.process)
    monkeypatch.setattr(ray_survey, "gather", lambda calls, limit: [([], {})] * len(calls))
    monkeypatch.setattr(cluster, "_collectives", lambda *arguments: [])
    nodes = [SimpleNamespace(name=f"h{i}", resources={}) for i in range(64)]
    monkeypatch.setattr(ray_survey, "nodes", lambda: nodes)
    return hosts


def clocks(left_s: float, hosts: Hosts) -> dict[str, tuple[str, ...]]:
    """The finding about clocks with so many seconds left of the deadline: value -> hosts."""
    found = cluster._look(Subject(DeviceKind.CPU, "/x"), hosts.clock + left_s)
    return {f.value: f.hosts for f in found if f.check == "cluster.clock"}


def test_all_hosts_are_asked_for_their_clocks_at_the_same_time(hosts: Hosts) -> None:
    hosts.ahead = {"h0": (0.5, 0.2), "h1": (-3.0, 0.2), "h2": (1.6, 1.0)}
    silent = tuple(f"h{i}" for i in range(3, 64))
    found = clocks(60.0, hosts)
    # The clock is read half way: of 3 s the 0.1 before it are not sure, of 1.6 the 0.5 after it.
    assert found == {
        "2.9 s behind": ("h1",),
        "1.1 s ahead": ("h2",),
        "answered once, and then no more": silent,
    }
    assert hosts.clock == pytest.approx(1003.0)


def test_clocks_are_not_waited_for_beyond_the_deadline(hosts: Hosts) -> None:
    hosts.ahead = {"h0": (0.0, 0.2)}
    (answered,) = clocks(0.5, hosts).values()
    assert len(answered) == 63 and hosts.clock == pytest.approx(1000.5)


def test_versions_name_this_package_and_python() -> None:
    assert {"mindspeed_rlxf", "python", "torch", "cann"} <= versions().keys()


def test_without_a_cluster_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(UserError, match="--cluster needs a Ray cluster and none is named"):
        look(Subject(DeviceKind.CPU, "/x"), None, 60.0)


def test_a_cluster_of_another_version_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: str, resources: dict[str, float]) -> None:
        raise RuntimeError("Version mismatch:\n the cluster runs Ray 2.9")

    monkeypatch.setattr("mindspeed_rlxf.doctor.cluster.open_cluster", refuse)
    (found,) = look(Subject(DeviceKind.CPU, "/x"), "127.0.0.1:6379", 60.0)
    assert found.status.value == "error" and "Version mismatch: the cluster" in found.value
