"""Rules of mixtures of experts; 8 ranks, see the tree of conftest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Problems = Callable[..., list[str]]

SPARSE: dict[str, Any] = {"model.small.num_experts": 12, "model.small.moe_ffn_hidden_size": 48}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


def keys(role: str, **values: Any) -> dict[str, Any]:
    return {f"{role}.{name}": value for name, value in values.items()}


def test_experts_shared_by_every_role_are_accepted(problems: Problems) -> None:
    assert problems(SPARSE) == []
    assert problems({**SPARSE, "training.expert_model_parallel_size": 4}) == []
    assert problems({**SPARSE, **keys("training", **TP2, expert_model_parallel_size=4)}) == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            keys("ref", expert_model_parallel_size=2),
            "ref.expert_model_parallel_size=2 needs experts, model.small is dense; use 1, or set "
            "model.small.num_experts",
        ),
        (
            {"model.small.moe_ffn_hidden_size": 48},
            "model.small.moe_ffn_hidden_size=48 needs num_experts, the model is dense; remove it",
        ),
        (
            {**SPARSE, **keys("ref", expert_model_parallel_size=8)},
            "ref.expert_model_parallel_size=8 must divide model.small.num_experts=12; use 4",
        ),
        (
            {**SPARSE, **keys("ref", expert_model_parallel_size=3)},
            "ref.expert_model_parallel_size=3 must divide the data-parallel size 8; use 2 or 4",
        ),
        (
            {**SPARSE, **keys("ref", tensor_model_parallel_size=4, expert_model_parallel_size=4)},
            "ref.expert_model_parallel_size=4 must divide the data-parallel size 2; use 2",
        ),
        (
            {**SPARSE, "model.small.moe_router_topk": 13},
            "model.small.moe_router_topk=13 must be at most num_experts=12; use 12 or less",
        ),
        (
            {**SPARSE, "model.small.moe_router_topk": 1},
            "model.small.moe_router_topk=1 needs moe_router_pre_softmax=true, or every expert's "
            "weight is 1 and the router learns nothing; use moe_router_pre_softmax=true, or 2 "
            "experts",
        ),
        (
            {**SPARSE, "model.small.add_qkv_bias": True},
            "model.small.add_qkv_bias=true has no model with num_experts here (Qwen3-MoE and "
            "Mixtral have no biases); use false",
        ),
        (
            {**SPARSE, **keys("critic", tensor_model_parallel_size=2)},
            "critic.sequence_parallel=false must be true where a model with experts learns with "
            "tensor_model_parallel_size=2; use critic.sequence_parallel=true",
        ),
        (
            {
                **SPARSE,
                "model.small.moe_aux_loss_coeff": 0.01,
                **keys("critic", pipeline_model_parallel_size=2),
            },
            "model.small.moe_aux_loss_coeff=0.01 needs critic.pipeline_model_parallel_size=1, not "
            "2, whose last stage alone knows the weight of a micro-batch; use 0, or one stage",
        ),
        (
            {**SPARSE, "model.small.moe_ffn_hidden_size": 45, **keys("training", **TP2)},
            "training.tensor_model_parallel_size=2 must divide "
            "model.small.moe_ffn_hidden_size=45; use 1",
        ),
    ],
)
def test_each_rule_says_what_to_use(
    problems: Problems, changes: dict[str, Any], problem: str
) -> None:
    assert problem in problems(changes)


def test_frozen_roles_may_be_split_without_sequence_parallel(problems: Problems) -> None:
    assert problems({**SPARSE, **keys("ref", tensor_model_parallel_size=2)}) == []


def test_a_coefficient_that_no_loss_reads_is_refused(problems: Problems) -> None:
    changes = {
        "model.small.moe_router_load_balancing_type": "none",
        "model.small.moe_aux_loss_coeff": 0.01,
        **keys("critic", pipeline_model_parallel_size=2),
    }
    assert problems({**SPARSE, **changes}) == [
        "model.small.moe_aux_loss_coeff=0.01 has no effect with "
        "moe_router_load_balancing_type=none; use 0, or aux_loss"
    ]
