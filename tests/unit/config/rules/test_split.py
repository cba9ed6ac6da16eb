"""A pool whose first devices train and whose others generate: what has to hold for its numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mindspeed_rlxf.compat import older_toolkit
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.layout import ParallelLayout, part_of
from mindspeed_rlxf.config.resolve import resolve

Problems = Callable[..., list[str]]
SPLIT: dict[str, Any] = {
    "resource_pool.actor": 8,
    "placement.actor_rollout": "actor",
    "actor_rollout.num_gpus_for_train": 4,
    "actor_rollout.num_gpus_for_infer": 4,
}
NODES = {"resource_pool.actor": [6, 2], "runtime.address": "head:6379"}


def test_training_has_the_first_ranks_and_generation_the_others(
    make_tree: Callable[..., Any],
) -> None:
    changes = {
        "actor_rollout.tensor_model_parallel_size": 2,
        "actor_rollout.pipeline_model_parallel_size": 2,
    }
    config = resolve(make_tree(SPLIT | changes), "t")
    assert config.parts == (4, 4)
    assert config.layout(Role.ACTOR_ROLLOUT) == ParallelLayout(4, 2, 2)
    assert config.rollout_layout == ParallelLayout(4, 2, 1)
    assert config.layout(Role.REF) == ParallelLayout(8)
    assert config.pool_of(Role.REWARD) == "main"  # a rule, whose place is not given


def test_without_the_keys_all_ranks_do_both(make_tree: Callable[..., Any]) -> None:
    changes = {
        "actor_rollout.tensor_model_parallel_size": 2,
        "actor_rollout.pipeline_model_parallel_size": 2,
    }
    config = resolve(make_tree(changes), "t")
    assert config.parts is None
    assert config.layout(Role.ACTOR_ROLLOUT) == ParallelLayout(8, 2, 2)
    assert config.rollout_layout == ParallelLayout(8, 2, 1)


@pytest.mark.parametrize("count", ["train", "infer"])
def test_both_numbers_are_needed(problems: Problems, count: str) -> None:
    missing = "infer" if count == "train" else "train"
    assert problems(SPLIT, drop=(f"actor_rollout.num_gpus_for_{missing}",)) == [
        f"actor_rollout.num_gpus_for_{missing} is required with actor_rollout.num_gpus_for_{count}"
        "=4; give both, which add up to the pool's devices, or remove both: then all of them train "
        "and generate"
    ]


def test_the_numbers_add_up_to_the_pool(problems: Problems) -> None:
    assert problems(SPLIT | {"actor_rollout.num_gpus_for_infer": 3}) == [
        "actor_rollout.num_gpus_for_train=4 and actor_rollout.num_gpus_for_infer=3 must add up to "
        "resource_pool.actor=8; use actor_rollout.num_gpus_for_infer=4, or resource_pool.actor=7"
    ]
    assert problems(SPLIT | {"actor_rollout.num_gpus_for_train": 8}) == [
        "actor_rollout.num_gpus_for_train=8 and actor_rollout.num_gpus_for_infer=4 must add up to "
        "resource_pool.actor=8; use resource_pool.actor=12"
    ]


def test_no_other_role_lives_on_a_split_pool(problems: Problems) -> None:
    [problem] = problems(SPLIT | {"placement.ref": "actor", "placement.reward": "main"})
    assert problem.startswith("placement.ref=actor must be another pool")


def test_the_local_runtime_cannot_split(problems: Problems) -> None:
    found = problems(SPLIT | {"runtime.kind": "local"})
    assert any(p.startswith("runtime.kind=local runs every role on the same") for p in found)


def test_training_replicas_are_whole(problems: Problems) -> None:
    changes = {"actor_rollout.pipeline_model_parallel_size": 4}
    parts = {"actor_rollout.num_gpus_for_train": 6, "actor_rollout.num_gpus_for_infer": 2}
    assert problems(SPLIT | changes | parts) == [
        "actor_rollout.num_gpus_for_train=6 must be a multiple of TP 1 x PP 4 = 4 of the actor "
        "(actor_rollout); use 4 or 8"
    ]


def test_the_rollout_has_a_tensor_parallel_size_of_its_own(
    make_tree: Callable[..., Any], problems: Problems
) -> None:
    for key in (
        "rollout.tensor_model_parallel_size",
        "actor_rollout.inference_tensor_model_parallel_size",
        "actor_rollout.inference-tensor-model-parallel-size",
    ):
        assert resolve(
            make_tree(SPLIT | {key: 4}), "t", older_toolkit
        ).rollout_layout == ParallelLayout(4, 4)
    assert problems(SPLIT | {"rollout.tensor_model_parallel_size": 3}) == [
        # 8 heads, 4 groups, 96 wide: 1, 2, 4 or 8
        "rollout.tensor_model_parallel_size=3 must divide actor_rollout.num_gpus_for_infer=4; use "
        "2 or 4",
        "rollout.tensor_model_parallel_size=3 must divide model.small.num_attention_heads=8; use "
        "2 or 4",
        "rollout.tensor_model_parallel_size=3 must divide model.small.num_query_groups=4, or be a "
        "multiple of it; use 2 or 4",
    ]


def test_the_older_key_of_it_is_named_as_it_was_written(problems: Problems) -> None:
    key = "actor_rollout.inference_tensor_model_parallel_size"
    assert problems(SPLIT | {key: 77}) == [
        f"{key}=77 must divide actor_rollout.num_gpus_for_infer=4; use 4",
        f"{key}=77 must divide model.small.num_attention_heads=8; use 8",
        f"{key}=77 must divide model.small.num_query_groups=4, or be a multiple of it; use 8",
        f"{key}=77 must divide model.small.ffn_hidden_size=96; use 8",
    ]
    (problem,) = problems({key: 2})
    assert problem.startswith(f"{key}=2 must be actor_rollout.tensor_model_parallel_size=1 where")
    assert problem.endswith("actor_rollout.num_gpus_for_train and actor_rollout.num_gpus_for_infer")


def test_a_size_that_the_rollout_takes_from_training_is_named_as_that(problems: Problems) -> None:
    changes = {"actor_rollout.tensor_model_parallel_size": 2}
    parts = {"actor_rollout.num_gpus_for_train": 6, "actor_rollout.num_gpus_for_infer": 1}
    found = problems(SPLIT | changes | parts | {"resource_pool.actor": 7})
    assert found == [
        "actor_rollout.num_gpus_for_infer=1 must be a multiple of "
        "actor_rollout.tensor_model_parallel_size=2, which the rollout has too; use 2, or give "
        "rollout.tensor_model_parallel_size"
    ]


def test_two_spellings_of_the_rollout_tensor_parallel_size_agree(problems: Problems) -> None:
    both = {
        "rollout.tensor_model_parallel_size": 2,
        "actor_rollout.inference_tensor_model_parallel_size": 4,
    }
    assert problems(SPLIT | both) == [
        "actor_rollout.inference_tensor_model_parallel_size and rollout.tensor_model_parallel_size="
        "2 say the same thing differently; keep one"
    ]


def test_ranks_that_do_both_have_one_tensor_parallel_size(problems: Problems) -> None:
    assert problems({"rollout.tensor_model_parallel_size": 1}) == []
    [problem] = problems({"rollout.tensor_model_parallel_size": 2})
    assert problem.startswith(
        "rollout.tensor_model_parallel_size=2 must be actor_rollout.tensor_model_parallel_size=1 "
        "where the rollout shares the actor's devices; remove it"
    )


def test_a_tensor_parallel_group_of_either_part_stays_on_a_node(problems: Problems) -> None:
    """[6, 2] with 5 + 3: training has 5 of the first node; generation its last one, and 2."""
    tp = {"rollout.tensor_model_parallel_size": 2}
    parts = {"actor_rollout.num_gpus_for_train": 4, "actor_rollout.num_gpus_for_infer": 4}
    assert problems(SPLIT | NODES | tp | parts) == []
    parts = {"actor_rollout.num_gpus_for_train": 2, "actor_rollout.num_gpus_for_infer": 6}
    found = problems(SPLIT | {"resource_pool.actor": [5, 3]} | tp | parts)
    assert [p for p in found if "may not span nodes" in p] == [
        "actor_rollout.num_gpus_for_infer=6: 3 processes on a node must be a multiple of the "
        "rollout's tensor-parallel size 2, which may not span nodes; use 2 or 4 on each node",
    ]


def test_parts_of_nodes_are_counted_in_the_order_of_ranks() -> None:
    assert part_of([6, 2], 0, 5) == [5]
    assert part_of([6, 2], 5, 3) == [1, 2]
    assert part_of([2, 2, 4], 2, 2) == [2]
    assert part_of([2, 2, 4], 0, 8) == [2, 2, 4]
