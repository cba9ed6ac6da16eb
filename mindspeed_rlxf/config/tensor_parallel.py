"""How tensor-parallel ranks share the attention heads and key-value groups of a model.

Up to one rank per group every rank has whole groups. Beyond that, as in megatron-core 0.16, several
ranks attend with the same group, each with its own query heads.
"""

from __future__ import annotations

from math import gcd

from mindspeed_rlxf.config.architecture import ArchitectureConfig
from mindspeed_rlxf.config.suggest import divisors

SHARED_GROUPS_SINCE = (0, 16)
"""Release of megatron-core from which on ranks can share a key-value group."""


def groups_per_rank(groups: int, tp: int) -> int:
    """Key-value groups that a rank attends with; a shared one counts on each of its ranks."""
    return max(1, groups // tp)


def qkv_rows(a: ArchitectureConfig) -> int:
    """Rows of the query, key and value projections together."""
    return (a.num_attention_heads + 2 * a.kv_heads) * a.head_dim


def whole_groups(a: ArchitectureConfig, tp: int) -> bool:
    """Whether every rank has whole groups, or every group is shared by as many ranks."""
    return a.kv_heads % tp == 0 or tp % a.kv_heads == 0


def possible_sizes(a: ArchitectureConfig) -> list[int]:
    """Tensor-parallel sizes that divide heads, groups, projections and the MLP, ascending."""
    common = gcd(a.num_attention_heads, a.mlp_hidden_size)
    return [tp for tp in divisors(common) if whole_groups(a, tp) and qkv_rows(a) % tp == 0]
