"""A pool whose first devices train and whose others generate."""

from typing import Any

import pytest

from mindspeed_rlxf.compat.mindspeed_llm.translate import translate
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.config.rank_layout import ParallelLayout, count_per_node

SPLIT: dict[str, Any] = {
    "resource_pool.actor": 8,
    "placement.actor_rollout": "actor",
    "actor_rollout.num_gpus_for_train": 4,
    "actor_rollout.num_gpus_for_infer": 4,
}
NODES = {"resource_pool.actor": [6, 2], "runtime.address": "head:6379"}


TP2_PP2 = {
    "actor_rollout.tensor_model_parallel_size": 2,
    "actor_rollout.pipeline_model_parallel_size": 2,
}


def test_training_has_the_first_ranks_and_generation_the_others(make_tree):
    config = resolve(make_tree(SPLIT | TP2_PP2), "t")
    assert config.train_rollout_split == (4, 4)
    assert config.layout(Role.ACTOR_ROLLOUT) == ParallelLayout(4, 2, 2)
    assert config.rollout_layout == ParallelLayout(4, 2, 1)
    assert config.layout(Role.REF) == ParallelLayout(8)
    assert config.placement[Role.REWARD] == "main"  # a rule, whose place is not given


ACTOR_TP = "actor_rollout.tensor_model_parallel_size"
ROLLOUT_TP = "rollout.tensor_model_parallel_size"
ROLLOUT_EP = "rollout.expert_model_parallel_size"
ACTOR_EP = "actor_rollout.expert_model_parallel_size"
EXPERTS = {"model.small.num_experts": 8, "model.small.moe_ffn_hidden_size": 32}
SPANS = "resource_pool.tensor_parallel_spans_nodes"
VLLM_TP = "rollout.vllm.tensor_parallel_size"
VLLM: dict[str, Any] = {
    "resource_pool.main": [6, 2], "runtime.address": "head:6379", "rollout.engine": "vllm",
}  # fmt: skip
OLDER_TP = "actor_rollout.inference_tensor_model_parallel_size"


def parts(train: int, infer: int, **more: Any) -> dict[str, Any]:
    """A disaggregated pool of that many devices; `more`: other keys, `__` for the dot."""
    sizes = {"actor_rollout.num_gpus_for_train": train, "actor_rollout.num_gpus_for_infer": infer}
    return SPLIT | sizes | {key.replace("__", "."): value for key, value in more.items()}


CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "both numbers are needed: train alone": (
        {key: value for key, value in SPLIT.items() if not key.endswith("infer")},
        ["actor_rollout.num_gpus_for_train=4"],
    ),
    "both numbers are needed: infer alone": (
        {key: value for key, value in SPLIT.items() if not key.endswith("train")},
        ["actor_rollout.num_gpus_for_infer=4"],
    ),
    "numbers add up to the pool: too few": (parts(4, 3), ["actor_rollout.num_gpus_for_train=4"]),
    "numbers add up to the pool: too many": (parts(8, 4), ["actor_rollout.num_gpus_for_train=8"]),
    "no other role lives on a disaggregated pool": (SPLIT | {"placement.ref": "actor",
     "placement.reward": "main"}, ["placement.ref=actor"]),
    "the local runtime cannot split": (SPLIT | {"runtime.kind": "local"},
     ["resource_pool.main=8", "resource_pool.actor=8", "actor_rollout.num_gpus_for_infer=4"]),
    "training replicas are whole": (parts(6, 2, actor_rollout__pipeline_model_parallel_size=4),
     ["actor_rollout.num_gpus_for_train=6"]),
    "a size of the rollout divides its devices, heads and groups": (SPLIT | {ROLLOUT_TP: 3},
     ["rollout.tensor_model_parallel_size=3"] * 3),
    "the older key of it is named as it was written": (SPLIT | {OLDER_TP: 77},
     [f"{OLDER_TP}=77"] * 4),
    "the older key of ranks that do both": ({OLDER_TP: 2}, [f"{OLDER_TP}=2"]),
    "a size that the rollout takes from training is named as that": (parts(6, 1,
     resource_pool__actor=7) | {ACTOR_TP: 2}, ["actor_rollout.num_gpus_for_infer=1"]),
    "two spellings of the size agree": (SPLIT | {ROLLOUT_TP: 2, OLDER_TP: 4}, [f"{OLDER_TP}"]),
    "ranks that do both have one size": ({ROLLOUT_TP: 1, ROLLOUT_EP: 1}, []),
    "ranks that do both share experts as in training": (EXPERTS | {ACTOR_EP: 2, ROLLOUT_EP: 4},
     [f"{ROLLOUT_EP}=4"]),
    "ranks that generate share experts": (EXPERTS | SPLIT | {ROLLOUT_EP: 4}, []),
    "as many as divide the experts and the replicas": (EXPERTS | SPLIT | {ROLLOUT_TP: 2,
     ROLLOUT_EP: 4}, [f"{ROLLOUT_EP}=4"]),
    "each has whole experts": (EXPERTS | parts(2, 6) | {ROLLOUT_EP: 3}, [f"{ROLLOUT_EP}=3"]),
    "a dense model has none to share": (SPLIT | {ROLLOUT_EP: 2}, [f"{ROLLOUT_EP}=2"]),
    "ranks that do both have no second size": ({ROLLOUT_TP: 2},
     ["rollout.tensor_model_parallel_size=2"]),
    "a tensor-parallel group of either part stays on a node": (NODES | parts(4, 4,
     resource_pool__actor=[6, 2]) | {ROLLOUT_TP: 2}, []),
    "a replica that generates stays on a node": (NODES | parts(4, 4,
     resource_pool__actor=[7, 1]) | {ROLLOUT_TP: 2}, [f"{ROLLOUT_TP}=2"]),
    "unless it may span nodes": (NODES | parts(4, 4, resource_pool__actor=[7, 1]) | {ROLLOUT_TP: 2,
     SPANS: True}, []),
    "a server stays on a node": (VLLM | {VLLM_TP: 4}, [f"{VLLM_TP}=4"]),
    "a server never spans nodes": (VLLM | {VLLM_TP: 4, SPANS: True}, [f"{VLLM_TP}=4"]),
    "a server that fits each node": (VLLM | {VLLM_TP: 2}, []),
    "a server on a part of the devices stays on a node": (NODES | parts(4, 4,
     resource_pool__actor=[7, 1], rollout__engine="vllm") | {VLLM_TP: 2}, [f"{VLLM_TP}=2"]),
}  # fmt: skip


def test_a_split_that_cannot_run_is_refused(check_cases):
    check_cases(CASES.values())


@pytest.mark.parametrize("key", [ROLLOUT_TP, OLDER_TP, OLDER_TP.replace("_tensor", "-tensor")])
def test_the_rollout_has_a_tensor_parallel_size_of_its_own(make_tree, key):
    config = resolve(translate(make_tree(SPLIT | {key: 4})), "t")
    assert config.rollout_layout == ParallelLayout(4, 4)


def test_parts_of_nodes_are_counted_in_the_order_of_ranks():
    assert count_per_node([6, 2], 0, 5) == [5]
    assert count_per_node([6, 2], 5, 3) == [1, 2]
    assert count_per_node([2, 2, 4], 2, 2) == [2]
    assert count_per_node([2, 2, 4], 0, 8) == [2, 2, 4]
