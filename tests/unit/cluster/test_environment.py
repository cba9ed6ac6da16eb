"""Which variables workers get, and which folders every node must have."""

from pathlib import Path

import pytest

from mindspeed_rlxf.cluster.ray.runtime import folders_of_workers
from mindspeed_rlxf.cluster.worker import (
    forwarded_environment,
    layout_environment,
    list_variables,
    offload_environment,
    worker_environment,
)
from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.config.secrets import Secret, reveal
from tests.unit.config.conftest import make_tree, no_cluster

__all__ = ["make_tree", "no_cluster"]


def opened(variables: dict[str, str]) -> dict[str, Secret]:
    return {name: Secret(value, value) for name, value in variables.items()}


def test_settings_of_libraries_are_forwarded_but_no_visibility() -> None:
    names = """
        HCCL_CONNECT_TIMEOUT ASCEND_LAUNCH_BLOCKING GLOO_SOCKET_IFNAME TP_SOCKET_IFNAME NCCL_DEBUG
        TASK_QUEUE_ENABLE CPU_AFFINITY_CONF PYTORCH_NPU_ALLOC_CONF CLOSE_MATMUL_K_SHIFT
        ATB_MATMUL_SHUFFLE_K_ENABLE LCCL_DETERMINISTIC
    """
    environment = {name: f"the {name}" for name in names.split()}
    hidden = {"ASCEND_RT_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "0", "HOME": "/"}
    assert reveal(forwarded_environment({**environment, **hidden})) == environment


def test_variables_of_the_pool_come_before_the_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HCCL_BUFFSIZE", "200")
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", "60")
    given = opened({"HCCL_BUFFSIZE": "256", "OMP_NUM_THREADS": "1"})
    found = worker_environment(given, inherits=False)
    assert {name: found[name] for name in (*given, "HCCL_CONNECT_TIMEOUT")} == {
        **given,
        "HCCL_CONNECT_TIMEOUT": Secret("60"),
    }
    assert worker_environment(given, inherits=True) == given
    shown = [v for v in list_variables(given) if v[0] in found]
    assert ("HCCL_BUFFSIZE", "256", "resource_pool.env") in shown
    assert ("HCCL_CONNECT_TIMEOUT", "60", "driver") in shown
    assert len({v[0] for v in shown}) == len(shown)
    monkeypatch.setenv("TP_TOKEN", "canary")
    assert ("TP_TOKEN", "***", "driver") in list_variables({})
    found = worker_environment({}, inherits=False)
    assert reveal(found)["TP_TOKEN"] == "canary" and not found["TP_TOKEN"].is_open


def test_a_run_that_offloads_gets_segments_that_grow(make_tree, monkeypatch):
    """For the allocator of its device, unless the user sets something."""
    name, value = "PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True"
    monkeypatch.delenv(name, raising=False)

    def given(
        kind: str, offload: bool, env: dict[str, str], engine: str = "native"
    ) -> dict[str, str]:
        changes = {"training.offload.optimizer": offload, "device.kind": kind}
        changes["rollout.engine"] = engine
        changes |= {"resource_pool.env": env, "runtime.address": "head:6379"}
        return offload_environment(resolve(make_tree(changes), "test"))

    assert given("npu", True, {}) == {name: value}
    assert given("cuda", True, {}) == {"PYTORCH_CUDA_ALLOC_CONF": value}
    assert given("npu", False, {}) == given("cpu", True, {}) == {}
    assert given("cuda", True, {}, "vllm") == {}  # its servers open memory of training
    assert given("npu", True, {name: "max_split_size_mb:64"}) == {}
    assert (name, value, "offload") in list_variables({}, {name: value})
    monkeypatch.setenv(name, "max_split_size_mb:32")
    assert given("npu", True, {}) == {}


def test_tensor_parallel_training_on_cuda_has_one_queue(make_tree, monkeypatch):
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.delenv(name, raising=False)

    def given(kind: str, tp: int, env: dict[str, str] | None = None) -> dict[str, str]:
        changes = {"training.tensor_model_parallel_size": tp, "device.kind": kind}
        changes |= {"resource_pool.env": env or {}, "runtime.address": "head:6379"}
        return layout_environment(resolve(make_tree(changes), "test"))

    assert given("cuda", 2) == {name: "1"}
    assert given("cuda", 1) == given("cpu", 2) == given("cuda", 2, {name: "8"}) == {}
    monkeypatch.setenv(name, "8")
    assert given("cuda", 2) == {}


def test_folders_of_models_and_tokenizer_are_read_on_every_node(make_tree):
    tree = make_tree({"critic.load": "weights/critic", "training.tokenizer_name_or_path": "tok"})
    here = Path.cwd()
    assert folders_of_workers(resolve(tree, "t")) == {
        f"{here}/weights/sft": "actor_rollout.load, ref.load",  # the reward is a rule
        f"{here}/weights/critic": "critic.load",
        f"{here}/tok": "training.tokenizer_name_or_path",
    }
