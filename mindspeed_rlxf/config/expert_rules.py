"""Rules of mixtures of experts: their architecture, and how ranks share them."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.roles import ArchitectureConfig
from mindspeed_rlxf.config.schema import RoleConfig
from mindspeed_rlxf.config.suggest import around, divisors, use

TRAINED = (Role.ACTOR_ROLLOUT, Role.CRITIC)
ONLY_WITH_EXPERTS = (
    "moe_ffn_hidden_size", "moe_router_topk", "moe_router_pre_softmax",
    "moe_router_load_balancing_type", "moe_aux_loss_coeff",
)  # fmt: skip


def expert_problems(role: Role, section: RoleConfig, dp: int | None) -> Iterator[str]:
    """Rules that a role breaks. dp: its data-parallel size, None where it has none."""
    a = section.architecture
    if a.num_experts is None:
        yield from _dense(role, section)
        return
    yield from _routing(a, f"model.{section.model}")
    yield from _balance(a, f"model.{section.model}")
    yield from _sharing(role, section, a.num_experts, dp)
    if role in TRAINED:
        yield from _training(role, section)


def _dense(role: Role, section: RoleConfig) -> Iterator[str]:
    ep, name = section.expert_model_parallel_size, f"model.{section.model}"
    if ep > 1:
        yield (
            f"{role.value}.expert_model_parallel_size={ep} needs experts, {name} is dense; use "
            f"1, or set {name}.num_experts"
        )
    for key in ONLY_WITH_EXPERTS:
        value = getattr(section.architecture, key)
        if value != ArchitectureConfig.model_fields[key].default:
            word = getattr(value, "value", value)
            yield f"{name}.{key}={word} needs num_experts, the model is dense; remove it"


def _routing(a: ArchitectureConfig, name: str) -> Iterator[str]:
    assert a.num_experts is not None, "a model with experts"
    if a.moe_router_topk > a.num_experts:
        yield (
            f"{name}.moe_router_topk={a.moe_router_topk} must be at most num_experts="
            f"{a.num_experts}; use {a.num_experts} or less"
        )
    if a.moe_router_topk == 1 and not a.moe_router_pre_softmax:
        yield (
            f"{name}.moe_router_topk=1 needs moe_router_pre_softmax=true, or every expert's weight "
            "is 1 and the router learns nothing; use moe_router_pre_softmax=true, or 2 experts"
        )
    if a.add_qkv_bias:
        yield (
            f"{name}.add_qkv_bias=true has no model with num_experts here (Qwen3-MoE and Mixtral "
            "have no biases); use false"
        )


def _balance(a: ArchitectureConfig, name: str) -> Iterator[str]:
    if a.moe_aux_loss_coeff and not a.balances_experts:
        kind = a.moe_router_load_balancing_type.value
        yield (
            f"{name}.moe_aux_loss_coeff={a.moe_aux_loss_coeff:g} has no effect with "
            f"moe_router_load_balancing_type={kind}; use 0, or aux_loss"
        )


def _sharing(role: Role, section: RoleConfig, num_experts: int, dp: int | None) -> Iterator[str]:
    ep = section.expert_model_parallel_size
    key = f"{role.value}.expert_model_parallel_size={ep}"
    good = divisors(gcd(num_experts, dp or num_experts))
    if num_experts % ep:
        yield (
            f"{key} must divide model.{section.model}.num_experts={num_experts}; "
            f"{use(around(ep, good))}"
        )
    if dp is not None and dp % ep:
        yield f"{key} must divide the data-parallel size {dp}; {use(around(ep, good))}"


def _training(role: Role, section: RoleConfig) -> Iterator[str]:
    a, tp = section.architecture, section.tensor_model_parallel_size
    if tp > 1 and not section.sequence_parallel:
        yield (
            f"{role.value}.sequence_parallel=false must be true where a model with experts learns "
            f"with tensor_model_parallel_size={tp}; use {role.value}.sequence_parallel=true"
        )
    pp = section.pipeline_model_parallel_size
    if a.balances_experts and pp > 1:
        yield (
            f"model.{section.model}.moe_aux_loss_coeff={a.moe_aux_loss_coeff:g} needs "
            f"{role.value}.pipeline_model_parallel_size=1, not {pp}, whose last stage alone knows "
            "the weight of a micro-batch; use 0, or one stage"
        )
