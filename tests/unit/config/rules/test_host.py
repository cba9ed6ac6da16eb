"""More processes than devices or memory; the local runtime and joined clusters."""

import pytest

from mindspeed_rlxf import device
from mindspeed_rlxf.config import packages
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.host_rules import GIB


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "device_count", lambda kind: 2)


@pytest.mark.usefixtures("two_gpus")
def test_more_devices_than_there_are_is_an_error(problems):
    (problem,) = problems({"device.kind": "cuda"})
    assert problem.startswith(
        "resource_pool (main=8) needs 8 cuda devices and this host has 2; use fewer"
    )


@pytest.mark.usefixtures("two_gpus")
def test_devices_of_a_joined_cluster_are_not_counted_here(problems, monkeypatch):
    changes = {"device.kind": "cuda"}
    assert problems({**changes, "runtime.address": "head:6379"}) == []
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert problems(changes) == []
    assert problems({**changes, "runtime.address": "local"}) != []


def test_a_megatron_core_that_shares_no_group_is_named(problems, monkeypatch):
    wide = {"critic.tensor_model_parallel_size": 8}  # 4 groups
    split = {"actor_rollout.num_gpus_for_train": 8, "actor_rollout.num_gpus_for_infer": 8}
    split |= {"resource_pool.actor": 16, "placement.actor_rollout": "actor"}
    split |= {"rollout.tensor_model_parallel_size": 8}
    assert problems(wide) == problems(split) == []
    for found, refused in (("0.12.1", True), ("0.15.3", True), ("0.16.0rc1", False)):
        monkeypatch.setitem(packages.SOURCES, packages.MEGATRON, lambda found=found: found)
        assert problems({"critic.tensor_model_parallel_size": 4}) == []
        for key, changes in (("critic", wide), ("rollout", split)):
            expected = [f"{key}.tensor_model_parallel_size=8"] if refused else []
            assert [problem.split(" ")[0] for problem in problems(changes)] == expected


def test_cpu_processes_must_fit_in_memory(problems, monkeypatch):
    monkeypatch.setattr(device, "host_memory", lambda: 4 * GIB)
    assert problems() == []  # 8 x 0.5 GiB
    monkeypatch.setattr(device, "host_memory", lambda: 3 * GIB)
    (problem,) = problems()
    assert problem.startswith("resource_pool (main=8) needs 8 processes of 0.5 GiB")


def test_local_runtime_needs_as_many_processes_as_torchrun_started(problems, monkeypatch):
    (problem,) = problems({"runtime": "local"})
    assert problem.startswith("resource_pool.main=8 must equal the 1 processes of this run")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert problems({"runtime": "local"}) == []


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("address", ["local", "head:6379"])
def test_devices_are_handed_out_by_rays_own_resource_only(problems, address):
    changes = {"resource_pool.main": 2, "device.kind": "cuda", "runtime.address": address}
    assert problems({**changes, "device.resource_name": "GPU"}) == []
    (problem,) = problems({**changes, "device.resource_name": "slot"})
    assert problem.startswith("device.resource_name=slot must be GPU with device.kind=cuda")
    assert problems({"device.kind": "cpu", "device.resource_name": "NPU"}) == []


def test_experts_on_npu_are_not_served_by_vllm(problems, monkeypatch):
    monkeypatch.setattr(device, "device_count", lambda _: 8)
    monkeypatch.setattr(device, "resolve_kind", lambda kind: DeviceKind.NPU)
    served = {"rollout.engine": "vllm"}
    experts = {"model.small.num_experts": 12, "model.small.moe_ffn_hidden_size": 48}
    assert problems(served) == problems(experts) == []
    (problem,) = problems(served | experts)
    assert problem.startswith("rollout.engine=vllm")


@pytest.mark.usefixtures("two_gpus")
def test_the_first_rank_gathers_nothing_on_npu(problems):
    changes = {"rollout.first_rank_draws": True, "runtime.address": "head:6379"}
    (problem,) = problems({**changes, "device.kind": "npu"})
    assert problem.startswith("rollout.first_rank_draws=true")
    assert problems({**changes, "device.kind": "cuda"}) == []


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("kind", ["cpu", "npu"])
def test_decode_graphs_are_those_of_cuda(problems, kind):
    changes = {"rollout.decode_graphs": True, "runtime.address": "head:6379"}
    (problem,) = problems({**changes, "device.kind": kind})
    assert problem.startswith("rollout.decode_graphs=true")
    assert problems({**changes, "device.kind": "cuda"}) == []
