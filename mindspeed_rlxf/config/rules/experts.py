"""Rules of how ranks share the experts of a mixture."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.errors import Problem, ref
from mindspeed_rlxf.config.schema import RoleConfig
from mindspeed_rlxf.config.suggest import around, divisors, use


def check_experts(role: Role, section: RoleConfig, dp: int | None) -> Iterator[Problem]:
    """Rules that a role breaks. dp: its data-parallel size, None where it has none."""
    experts, ep = section.architecture.num_experts, section.expert_model_parallel_size
    if experts is None:
        return
    key = f"{role.value}.expert_model_parallel_size"
    remedy = use(around(ep, divisors(gcd(experts, dp or experts))))
    if experts % ep:
        number = ref(f"model.{section.model}.num_experts")
        yield Problem(key, f"must divide {number}={experts}", ep, remedy)
    if dp is not None and dp % ep:
        yield Problem(key, f"must divide the data-parallel size {dp}", ep, remedy)
