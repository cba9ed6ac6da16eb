"""The plan states every size of a run, as worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mindspeed_rlxf.config.resolve import resolve
from mindspeed_rlxf.ops.planning.plan import plan

CHANGES = {
    "resource_pool.main": [4, 4],
    "actor_rollout.tensor_model_parallel_size": 2,
    "actor_rollout.pipeline_model_parallel_size": 2,
    "actor_rollout.micro_batch_size": 12,
    "actor_rollout.ppo_epochs": 3,
    "actor_rollout.num_samples_per_step": 20,
    "critic.micro_batch_size": 2,
}


def lines(make_tree: Callable[..., Any], changes: dict[str, Any]) -> list[str]:
    text = plan(resolve(make_tree(changes), "t")).text
    return [" ".join(line.split()) for line in text.splitlines()]


def test_plan_shows_layouts_and_ranks(make_tree: Callable[..., Any]) -> None:
    shown = lines(make_tree, CHANGES)
    assert any(line.startswith("actor_rollout small main 8 2 2 2 1 fp32 ") for line in shown)
    assert "reward rule main 8 - - 8 - - -" in shown
    assert "main 1 2 6 0,1,1 0,0,6 0,0,6 0,0,6" in shown


def test_plan_shows_every_batch_size(make_tree: Callable[..., Any]) -> None:
    """96 samples; actor DP 2: 48 each, 2 mini-batches of 48 = 24 a rank = 2 x 12.

    The rollout has no pipeline, so 4 replicas of TP 2 generate 24 each.
    """
    shown = lines(make_tree, CHANGES)
    assert "prompts (global_batch_size) 96" in shown
    assert "samples per actor replica 48" in shown
    assert "generated at once per rollout replica 20 (rounds: 2)" in shown
    assert "longest prompt + response 8 + 16 tokens" in shown
    assert "actor_rollout 48 12 4" in shown  # forward: samples per rank, micro-batch, count
    assert "actor_rollout 48 2 3 6 2 18 0.0001" in shown
    assert "critic 32 3 1 3 2 9 1e-06" in shown


def test_plan_shows_a_virtual_pipeline(make_tree: Callable[..., Any]) -> None:
    """DP 4: 24 samples by 5 are 5 micro-batches, 6 for two stages."""
    keys = {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}
    virtual = {f"ref.{key}": value for key, value in keys.items()}
    shown = lines(make_tree, {**virtual, "ref.micro_batch_size": 5})
    assert any(line.startswith("ref small main 8 1 2 x 2 chunks 4 1 fp32 ") for line in shown)
    assert "ref 24 5 6" in shown


def test_plan_shows_micro_batches_by_tokens(make_tree: Callable[..., Any]) -> None:
    """50 tokens hold two of the longest samples of 24, so DP 8 with 96 / 8 = 12 makes 6 at most; a
    mini-batch has 48 / 8 = 6 a rank, 3 at most."""
    shown = lines(make_tree, {"actor_rollout.max_tokens_per_micro_batch": 50})
    assert "actor_rollout 12 <= 50 tokens <= 6" in shown
    assert "actor_rollout 48 2 1 2 <= 3 6 0.0001" in shown
    assert "critic 12 1 12" in shown


def test_plan_shows_where_output_goes(make_tree: Callable[..., Any]) -> None:
    shown = lines(make_tree, {"training.output_dir": "/somewhere/run"})
    assert "output /somewhere/run" in shown
    assert any(line.startswith("runtime ray, own cluster on this host (") for line in shown)


def test_plan_has_no_trailing_space(make_tree: Callable[..., Any]) -> None:
    text = plan(resolve(make_tree(), "t")).text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_plan_shows_variables_of_the_workers_with_their_source(
    make_tree: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", "60")
    monkeypatch.setenv("HCCL_BUFFSIZE", "100")
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "2")
    shown = lines(make_tree, {"resource_pool.env": {"HCCL_BUFFSIZE": 256}})
    assert "HCCL_CONNECT_TIMEOUT 60 driver" in shown
    assert "TASK_QUEUE_ENABLE 2 driver" in shown
    assert "HCCL_BUFFSIZE 256 resource_pool.env" in shown
