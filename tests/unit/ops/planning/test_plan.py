"""The plan states every size of a run, as worked out by hand."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.data.mini_batches import sample_flops
from mindspeed_rlxf.device import driver
from mindspeed_rlxf.device.driver import DriverDevice, DriverView
from mindspeed_rlxf.ops.planning import available
from mindspeed_rlxf.ops.planning.available import fill_hosts
from mindspeed_rlxf.ops.planning.plan import place_pools, plan, topology
from mindspeed_rlxf.ops.planning.work import describe_work
from tests.unit.ops.planning.test_memory import SPLIT_POOL


def test_an_iteration_has_tokens_flops_and_minutes(make_tree: Callable[..., Any]) -> None:
    """96 samples of 8 + 16 tokens on 8 devices, at half of a peak of 1e-3 TFLOPS."""
    keys = {"plan.peak_tflops": 1e-3, "plan.mfu": 0.5, "actor_rollout.ppo_epochs": 2}
    config = resolve(make_tree(keys), "test")
    lines = [line.split() for line in describe_work(config).splitlines()]
    actor = next(line for line in lines if line[:2] == ["actor", "update"])
    flops = 2 * 3 * 96 * sample_flops(config.actor_rollout.architecture, 24, 16)
    assert actor[2:4] == ["6", str(96 * 24)] and actor[5] == "8"
    assert float(actor[4]) == pytest.approx(flops / 1e15, rel=1e-2)
    generation = next(line for line in lines if line[0] == "generation")
    assert generation[-1] == "-", "decoding is bound by memory bandwidth"
    together = next(line for line in lines if line[0] == "all,")
    minutes = [float(line[-1]) for line in lines[2:-2] if line is not generation]
    assert float(together[-1]) == pytest.approx(sum(minutes), rel=0.1)
    assert float(actor[6]) == pytest.approx(flops / (8 * 1e9 * 0.5) / 60, rel=0.05)


@pytest.mark.parametrize(
    ("names", "peak"),
    [(["NVIDIA H200", "NVIDIA H100 80GB HBM3"], 989.0), (["NVIDIA H200", "other"], None)],
)
def test_the_peak_is_that_of_the_devices_of_this_host(make_tree, monkeypatch, names, peak):
    """Unless the plan is for another machine, or a device is not in the table."""
    devices = tuple(DriverDevice(i, name, "OK", 80000, 0) for i, name in enumerate(names))
    view = DriverView("nvidia-smi", "550", devices)
    monkeypatch.setattr(driver, "query_driver", lambda _: view)
    monkeypatch.setattr(available, "check_devices", lambda _: [])
    keys = {"device.kind": "cuda", "dry_run": True, "plan.disk_gib": 99.0}
    config = resolve(make_tree(keys), "test")
    assert available.look_once(config).plan.peak_tflops == peak
    other = resolve(make_tree({**keys, "device.memory_gib": 64.0}), "test")
    assert available.look_once(other).plan.peak_tflops is None


SPLIT = {
    "resource_pool.main": [4, 4],
    "actor_rollout.tensor_model_parallel_size": 2,
    "actor_rollout.pipeline_model_parallel_size": 2,
    "actor_rollout.micro_batch_size": 12,
    "actor_rollout.ppo_epochs": 3,
    "actor_rollout.num_samples_per_step": 20,
    "critic.micro_batch_size": 2,
}
CHUNKS = {
    "ref.pipeline_model_parallel_size": 2,
    "ref.num_layers_per_virtual_pipeline_stage": 1,
    "ref.micro_batch_size": 5,
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            # 96 samples; actor DP 2: 48 each, 2 mini-batches of 48 = 24 a rank = 2 x 12.
            # The rollout has no pipeline, so 4 replicas of TP 2 generate 24 each.
            SPLIT,
            [
                "actor_rollout small main 8 2 1 2 2 1 fp32 ",
                "reward rule main 8 - - - 8 - - - - -",
                "main 1 2 6 0,1,1 0,0,6 0,0,6 0,0,6",
                "prompts (global_batch_size) 96",
                "samples per actor replica 48",
                "generated at once per rollout replica 20 (rounds: 2)",
                "longest prompt + response 8 + 16 tokens",
                "actor_rollout 48 12 4",  # forward: samples per rank, micro-batch, count
                "actor_rollout 48 2 3 6 2 18 0.0001",
                "critic 32 3 1 3 2 9 1e-06",
            ],
        ),
        # DP 4: 24 samples by 5 are 5 micro-batches, 6 for two stages
        (CHUNKS, ["ref small main 8 1 1 2 x 2 chunks 4 1 fp32 ", "ref 24 5 6"]),
        ({"ref.context_parallel_size": 4}, ["ref small main 8 1 4 1 2 1 fp32 "]),
        (
            # 50 tokens hold two of the longest samples of 24, so DP 8 with 96 / 8 = 12 makes 6 at
            # most; a mini-batch has 48 / 8 = 6 a rank, 3 at most
            {"actor_rollout.max_tokens_per_micro_batch": 50, "critic.micro_batch_size": 1},
            [
                "actor_rollout 12 <= 50 tokens <= 6",
                "actor_rollout 48 2 1 2 <= 3 6 0.0001",
                "critic 12 1 12",
            ],
        ),
        (
            {"training.output_dir": "/somewhere/run"},
            ["output /somewhere/run", "runtime ray, private cluster on this host ("],
        ),
        (
            {"resource_pool.env": {"HCCL_BUFFSIZE": 256}},
            [
                "HCCL_CONNECT_TIMEOUT 60 driver",
                "TASK_QUEUE_ENABLE 2 driver",
                "HCCL_BUFFSIZE 256 resource_pool.env",
            ],
        ),
        (
            {"rollout.tools": ["python"], "rollout.agent_lag": 2, "rollout.tool_processes": 3},
            [
                "agent tools, turns: 8, slices until an answer: 2 (of 32 decode steps)",
                "tools python, processes: 24 (replicas: 8)",
            ],
        ),
    ],
)
def test_the_plan_shows_sizes_places_and_variables(make_tree, monkeypatch, changes, expected):
    """expected: lines; those that end in a space or a bracket go on"""
    variables = {"HCCL_CONNECT_TIMEOUT": "60", "HCCL_BUFFSIZE": "100", "TASK_QUEUE_ENABLE": "2"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    lines = plan(resolve(make_tree(changes), "t")).text.splitlines()
    assert lines == [line.rstrip() for line in lines]
    shown = [" ".join(line.split()) for line in lines]
    for line in expected:
        is_start = line.endswith((" ", "("))
        assert any(each.startswith(line) if is_start else each == line for each in shown), line


LARGE = {
    "resource_pool.main": [8] * 64,
    "training.global_batch_size": 512,
    "actor_rollout.ppo_mini_batch_size": 512,
    "critic.critic_mini_batch_size": 512,
    "actor_rollout.tensor_model_parallel_size": 4,
    "actor_rollout.pipeline_model_parallel_size": 4,
    "runtime.address": "head:6379",
}


def lines(make_tree: Callable[..., Any], changes: dict[str, Any]) -> list[str]:
    text = topology(resolve(make_tree(changes), "t"))
    return [" ".join(line.split()) for line in text.splitlines()]


def test_ranks_of_a_stage_share_a_line_where_there_are_many(make_tree):
    """512 ranks, TP 4 x PP 4 x DP 32: a stage is 128 ranks on 16 hosts."""
    shown = lines(make_tree, LARGE)
    assert shown[2:] == [
        "main 0-15 0-7 0-127 0-3,0,0-31 0,0,0-127 0,0,0-127 0,0,0-127",
        "main 16-31 0-7 128-255 0-3,1,0-31 0,0,128-255 0,0,128-255 0,0,128-255",
        "main 32-47 0-7 256-383 0-3,2,0-31 0,0,256-383 0,0,256-383 0,0,256-383",
        "main 48-63 0-7 384-511 0-3,3,0-31 0,0,384-511 0,0,384-511 0,0,384-511",
    ]


def test_hosts_and_devices_are_counted_over_the_cluster() -> None:
    """Two hosts of 8: reward (2) follows critic (4) and ref (2) on the second one."""
    places = place_pools({"actor": [8], "ref": [2], "critic": [4], "reward": [2]}, 8)
    assert places["actor"] == [(0, device) for device in range(8)]
    assert places["critic"] == [(1, 0), (1, 1), (1, 2), (1, 3)]
    assert places["ref"] == [(1, 4), (1, 5)]
    assert places["reward"] == [(1, 6), (1, 7)]


def test_entries_of_a_pool_are_on_different_hosts() -> None:
    """5 + 4 devices need two hosts of 8; ref takes what the first one has left."""
    places = place_pools({"actor": [5, 4], "ref": [3]}, 8)
    hosts = [host for host, _ in places["actor"]]
    assert hosts == [0] * 5 + [1] * 4
    assert places["ref"] == [(0, 5), (0, 6), (0, 7)]


def test_only_the_plan_for_a_cluster_has_a_second_host(make_tree) -> None:
    """`main` fills the 8 devices of host 0; a private cluster has all 10 on this host."""
    changes = {"resource_pool.actor": 2, "placement.actor_rollout": "actor"}
    shown = lines(make_tree, {**changes, "runtime.address": "head:6379"})
    assert any(line.startswith("actor 1 0 0 ") for line in shown)
    shown = lines(make_tree, changes)
    assert any(line.startswith("actor 0 8 0 ") for line in shown)


def test_parts_of_a_split_pool_have_tables_of_their_own(make_tree):
    """Ranks and devices are the pool's; places count from the first rank of the part."""
    shown = lines(make_tree, {**SPLIT_POOL, "resource_pool.actor": [4, 4]})
    header = shown.index("pool hosts devices ranks rollout TP,PP,DP")
    # rank 5 = DP 2 + 3 x PP 1 of training; ranks 6 and 7 are TP 0 and 1 of generation
    assert shown[header - 2] == "actor 1 1 5 0,1,2"
    assert shown[header + 2 : header + 4] == ["actor 1 2 6 0,0,0", "actor 1 3 7 1,0,0"]


def test_a_plan_for_other_hosts_counts_processes_per_host(make_tree) -> None:
    """16 devices are two hosts of 8, or one host where the run is to start its own Ray."""
    changes = {"resource_pool.main": 16, "device.memory_gib": 64}
    text = plan(resolve(make_tree(changes), "t")).text
    assert "processes (8)" in text
    assert re.search(r"^  main +1 +7 +15 ", text, re.MULTILINE)
    text = plan(resolve(make_tree({**changes, "runtime.address": "local"}), "t")).text
    assert "processes (16)" in text
    assert re.search(r"^  main +0 +15 +15 ", text, re.MULTILINE)


def test_a_pool_larger_than_a_host_fills_whole_hosts() -> None:
    assert fill_hosts([20], 8) == [8, 8, 4]
    assert fill_hosts([8, 4], 8) == [8, 4]
