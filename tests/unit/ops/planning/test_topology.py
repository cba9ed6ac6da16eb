"""Ranks stand where `ParallelLayout` puts them."""

from collections.abc import Callable
from typing import Any

from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.ops.planning.plan import topology

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


def test_ranks_of_a_stage_share_a_line_where_there_are_many(make_tree: Callable[..., Any]) -> None:
    """512 ranks, TP 4 x PP 4 x DP 32: a stage is 128 ranks on 16 hosts."""
    shown = lines(make_tree, LARGE)
    assert shown[2:] == [
        "main 0-15 0-7 0-127 0-3,0,0-31 0,0,0-127 0,0,0-127 0,0,0-127",
        "main 16-31 0-7 128-255 0-3,1,0-31 0,0,128-255 0,0,128-255 0,0,128-255",
        "main 32-47 0-7 256-383 0-3,2,0-31 0,0,256-383 0,0,256-383 0,0,256-383",
        "main 48-63 0-7 384-511 0-3,3,0-31 0,0,384-511 0,0,384-511 0,0,384-511",
    ]


def test_parts_of_a_split_pool_have_tables_of_their_own(make_tree: Callable[..., Any]) -> None:
    """Ranks and devices are the pool's; places count from the first rank of the part."""
    changes = {
        "resource_pool.actor": [4, 4],
        "placement.actor_rollout": "actor",
        "actor_rollout.num_gpus_for_train": 6,
        "actor_rollout.num_gpus_for_infer": 2,
        "actor_rollout.pipeline_model_parallel_size": 2,
        "rollout.tensor_model_parallel_size": 2,
    }
    shown = lines(make_tree, changes)
    header = shown.index("pool hosts devices ranks rollout TP,PP,DP")
    # rank 5 = DP 2 + 3 x PP 1 of training; ranks 6 and 7 are TP 0 and 1 of generation
    assert shown[header - 2] == "actor 1 1 5 0,1,2"
    assert shown[header + 2 : header + 4] == ["actor 1 2 6 0,0,0", "actor 1 3 7 1,0,0"]
