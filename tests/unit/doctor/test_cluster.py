"""What differs between hosts is told with the hosts that differ from most."""

from __future__ import annotations

import pytest

from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.errors import UserError
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
