"""Differences between hosts are reported with the hosts that differ; the report keeps its form."""

import json
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from mindspeed_rlxf.cluster.nodes import Node
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.device import worlds
from mindspeed_rlxf.device.findings import Finding, error, ok
from mindspeed_rlxf.ops.doctor import hosts, output
from mindspeed_rlxf.ops.doctor.hosts import all_reduce, arrival_key, version_findings


def test_hosts_with_another_version_are_named() -> None:
    usual = {"mindspeed_rlxf": "0.1.0, sources a", "torch": "2.7.1"}
    by_host = {f"h{i}": usual for i in range(5)}
    by_host["h2"] = {**usual, "torch": "2.6.0"}
    by_host["h4"] = {**usual, "mindspeed_rlxf": "0.1.0, sources b"}
    found = [(f.status.value, f.value, f.hosts) for f in version_findings(by_host)]
    assert found == [
        ("error", "torch 2.6.0, on most hosts 2.7.1", ("h2",)),
        ("error", "mindspeed_rlxf 0.1.0, sources b, on most hosts 0.1.0, sources a", ("h4",)),
    ]
    built_alone = {**usual, "torch": "2.7.1+cpu"}  # a head without devices, as a run allows
    assert [f.status.value for f in version_findings({"h0": usual, "h1": built_alone})] == ["ok"]


def test_devices_that_ray_does_not_offer_are_reported_with_the_command() -> None:
    found = hosts.ray_finding("NPU", 0, 8)
    assert found.status.value == "warning" and '"NPU": 8' in found.remedy
    assert hosts.ray_finding("NPU", 8, 8).status.value == "ok"


NODES = [Node(f"h{i}", f"h{i}", f"10.0.0.{i}", 2, 2) for i in range(3)]


def collectives(
    monkeypatch: pytest.MonkeyPatch, *replies: Any, silent: str = ""
) -> tuple[list[Finding], list[int]]:
    """Findings where the tasks have these results, in order, and "" those that follow.

    With them the sizes of the groups that were tried. silent: the host whose ranks do not come
    """
    from mindspeed_rlxf.cluster.ray import node_tools as ray_nodes

    left, sizes, stores = list(replies), [], []

    def run(tasks: Sequence[Any], environment: Any, limit_s: float) -> list[Any]:
        sizes.extend(world_size for *_, rank, world_size, _ in (t.args for t in tasks) if not rank)
        return [left.pop(0) if left else "" for _ in tasks]

    def open_store(ip: str) -> tuple[SimpleNamespace, int]:
        """Open the store of the next group; the first three are those of single hosts."""
        came = f"h{len(stores)}" != silent
        stores.append(ip)
        return SimpleNamespace(check=lambda keys: came), 1

    monkeypatch.setattr(worlds, "open_store", open_store)
    monkeypatch.setattr(ray_nodes, "run_tasks", run)
    monkeypatch.setattr(ray_nodes.ray.util, "get_node_ip_address", lambda: "10.0.0.0")
    return hosts._check_collectives(DeviceKind.CPU, "rlxf_cpu", NODES, {}), sizes


def test_all_hosts_pass_alone_and_together(monkeypatch: pytest.MonkeyPatch) -> None:
    found, sizes = collectives(monkeypatch)
    assert [(f.check, f.status.value, f.value) for f in found] == [
        ("collectives.inside", "ok", "6 ranks on 3 of 3 hosts"),
        ("collectives.all", "ok", "6 ranks on 3 of 3 hosts together"),
    ]
    assert sizes == [2, 2, 2, 6]


def test_a_host_that_fails_alone_is_named_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from mindspeed_rlxf.cluster.ray.node_tools import Failed

    found, sizes = collectives(
        monkeypatch, "", "", Failed("no reply"), Failed("no reply"), silent="h1"
    )
    assert [(f.check, f.status.value, f.hosts) for f in found] == [
        ("collectives.inside", "error", ("h1",)),
        ("collectives.inside", "ok", ()),
        ("collectives.all", "ok", ()),
    ]
    assert found[0].value == "rank 0 on h1, rank 1 on h1 never came; no reply"
    assert sizes == [2, 2, 2, 4]


def test_hosts_that_fail_only_together_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = collectives(monkeypatch, *[""] * 6, "RuntimeError: connection refused")
    assert found[-1].check == "collectives.all" and found[-1].status.value == "error"
    assert "connection refused" in found[-1].value


LOOPBACK = "127.0.0.1"


def test_a_rank_alone_sums_by_itself_and_leaves_no_group() -> None:
    store, port = worlds.open_store(LOOPBACK)
    assert all_reduce(DeviceKind.CPU, LOOPBACK, port, 0, 1, 30.0) == ""
    assert store.check([arrival_key(0)])
    assert not dist.is_initialized()


def test_a_rank_that_never_comes_is_reported_at_the_deadline() -> None:
    started = time.monotonic()
    store, port = worlds.open_store(LOOPBACK)
    assert all_reduce(DeviceKind.CPU, LOOPBACK, port, 0, 2, 1.0) != ""
    assert store.check([arrival_key(0)]) and not store.check([arrival_key(1)])
    assert time.monotonic() - started < 20
    assert not dist.is_initialized()


def test_equal_findings_of_hosts_become_one() -> None:
    both = ok("a", "1")
    merged = output.merge([both.on("h1"), error("b", "x", "y").on("h1"), both.on("h2")])
    assert [(f.check, f.hosts) for f in merged] == [("a", ("h1", "h2")), ("b", ("h1",))]


def test_the_report_for_programs_keeps_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output.socket, "gethostname", lambda: "here")
    made = output.as_json([ok("a", "1"), error("b", "2", "c").on("h")])
    assert made.pop("time").endswith("+00:00") and ", sources " in made.pop("build")
    assert json.loads(json.dumps(made)) == {
        "schema": 1,
        "host": "here",
        "exit_code": 1,
        "counts": {"ok": 1, "warning": 0, "error": 1},
        "findings": [
            {"check": "a", "status": "ok", "value": "1", "remedy": "", "hosts": ["here"]},
            {"check": "b", "status": "error", "value": "2", "remedy": "c", "hosts": ["h"]},
        ],
    }


def test_the_worst_comes_first_with_its_remedy_below() -> None:
    lines = output.as_text([ok("a", "1"), error("area.b", "missing x", "copy it")]).splitlines()
    assert lines[0] == "error    area.b  missing x" and lines[1].strip() == "-> copy it"
    assert lines[2].split() == ["ok", "a", "1"]
    assert ": 1 error, 0 warnings, 1 ok  (" in lines[-1]
