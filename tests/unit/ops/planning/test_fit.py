"""A plan that does not fit says so, with a remedy, where the memory is known."""

from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf import device
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.config.ray_cluster import Cluster
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.ops.planning import available
from mindspeed_rlxf.ops.planning.fit import check_fit
from mindspeed_rlxf.ops.planning.plan import plan
from mindspeed_rlxf.ops.sizes import GIB

JOINED = {"device.kind": "cuda", "runtime.address": "head:6379"}
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def large_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models here need more than a machine that tests may have."""
    monkeypatch.setattr(available.shutil, "disk_usage", lambda path: Usage(10**15, 0, 10**15))


@pytest.fixture
def config(make_tree: Callable[..., Any], tmp_path: Path) -> Callable[..., RunConfig]:
    keys = {"training.output_dir": str(tmp_path / "run"), "training.micro_batch_size": 1}
    return lambda changes: resolve(make_tree({**keys, **changes}), "test")


def section(config: RunConfig, title: str) -> str:
    return next(body for name, body in check_fit(config)[0].items() if name.startswith(title))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, "memory of a device is unknown: set device.memory_gib"),
        ({"device.memory_gib": 64}, "fits: needs"),
    ],
)
def test_memory_that_fits_or_is_unknown_is_no_problem(config, keys, said):
    run = config({**JOINED, **keys})
    assert check_fit(run)[1] == []
    assert said in section(run, "Memory per device, pool main")


def test_too_little_memory_is_a_problem_with_a_remedy(config):
    # a process takes 512 MiB without any tensor
    run = config({**JOINED, "device.memory_gib": 0.25})
    (problem,) = map(str, check_fit(run)[1])
    assert problem.startswith("resource_pool.main: a device needs ")
    assert "has 256.0 MiB; set offload" in problem and "plan.suggest=true" in problem
    assert "does not fit: needs" in section(run, "Memory per device, pool main")


def test_every_phase_has_a_line(config):
    lines = section(config({}), "Memory per device, pool main").splitlines()
    actor = [f"actor_rollout {name}" for name in ("forward", "update", "optimizer", "generate")]
    critic = [f"critic {name}" for name in ("forward", "update", "optimizer")]
    shown = [" ".join(line.split()[:2]) for line in lines[2:-1]]
    assert shown == [*actor, "ref forward", *critic, "together generate"]


def test_disk_that_is_full_is_a_problem(config, monkeypatch):
    run = config({})
    monkeypatch.setattr(available.shutil, "disk_usage", lambda path: Usage(10, 10, 0))
    (problem,) = map(str, check_fit(run)[1])
    assert problem.startswith("training.output_dir=") and "has 0; free some space" in problem


def test_a_plan_for_another_machine_asks_nothing_of_this_host(config, monkeypatch):
    """Its memory and disk are those of `plan`, or unknown."""
    monkeypatch.setattr(device, "host_memory", lambda: 4 * GIB)
    monkeypatch.setattr(available.shutil, "disk_usage", lambda path: Usage(10, 10, 0))
    keys = {"device.memory_gib": 64}
    assert plan(config(keys)).problems == []
    sizes = {"plan.host_memory_gib": 0.25, "plan.disk_gib": 0.001}
    host, disk = map(str, plan(config({**keys, **sizes})).problems)
    assert host.startswith("resource_pool: the host needs ") and "has 256.0 MiB" in host
    assert disk.startswith("training.output_dir=") and "has 1.0 MiB" in disk


def test_devices_with_memory_of_their_own_use_none_of_the_host(config):
    """On a host without devices `auto` would be CPU, whose roles hold their models there."""
    of_roles = "what the roles hold"
    auto = {"device.kind": "auto"}
    assert of_roles in plan(config(auto)).text
    assert of_roles not in plan(config({**auto, "device.memory_gib": 64})).text


def test_the_tool_of_the_driver_runs_once_for_a_plan(config, monkeypatch):
    """It takes seconds, and every role and layout asks for the memory."""
    asked: list[DeviceKind] = []

    def measure(kind: DeviceKind) -> int:
        asked.append(kind)
        return GIB // 4

    monkeypatch.setattr(device, "smallest_device_memory", measure)
    monkeypatch.setattr(available, "choose_cluster", lambda _: Cluster(None, ""))
    run = config({**JOINED, "device.kind": "npu"})
    for times in (1, 2):
        assert any("a device needs" in each.rule for each in plan(run).problems)
        assert len(asked) == times
