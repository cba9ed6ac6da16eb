"""The plan states every size of a run, as worked out by hand."""

from collections.abc import Callable
from typing import Any

import pytest

from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.ops.planning.plan import plan

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
                "actor_rollout small main 8 2 2 2 1 fp32 ",
                "reward rule main 8 - - 8 - - -",
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
        (
            # DP 4: 24 samples by 5 are 5 micro-batches, 6 for two stages
            CHUNKS,
            ["ref small main 8 1 2 x 2 chunks 4 1 fp32 ", "ref 24 5 6"],
        ),
        (
            # 50 tokens hold two of the longest samples of 24, so DP 8 with 96 / 8 = 12 makes 6 at
            # most; a mini-batch has 48 / 8 = 6 a rank, 3 at most
            {"actor_rollout.max_tokens_per_micro_batch": 50},
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
    ],
)
def test_the_plan_shows_sizes_places_and_variables(
    make_tree: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    expected: list[str],
) -> None:
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
