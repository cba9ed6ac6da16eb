"""How tensor-parallel ranks share the attention heads and key-value groups of a model.

Up to one rank per group every rank has whole groups. Beyond that, as in megatron-core 0.16, several
ranks attend with the same group, each with its own query heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from mindspeed_rlxf.config.architecture import ArchitectureConfig
from mindspeed_rlxf.config.errors import Problem, ref
from mindspeed_rlxf.config.suggest import around, divisors, use

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


def uneven(
    key: str, tp: int, a: ArchitectureConfig, model: str, section: str = ""
) -> Iterator[Problem]:
    """Rules that a tensor-parallel size breaks with a model.

    key:     of the size
    model:   name of the architecture
    section: what stands before `architecture` in the keys of the model's sizes
    """
    good = use(around(tp, possible_sizes(a)))

    def size(name: str, number: int) -> str:
        return f"{ref(f'{section}architecture.{name}')}={number}"

    if a.num_attention_heads % tp:
        heads = size("num_attention_heads", a.num_attention_heads)
        yield Problem(key, f"must divide {heads}", tp, good)
    if not whole_groups(a, tp):
        groups = size("num_query_groups", a.kv_heads)
        yield Problem(key, f"must divide {groups}, or be a multiple of it", tp, good)
    elif a.num_attention_heads % tp == 0 and qkv_rows(a) % tp:
        rule = f"must divide the {qkv_rows(a)} rows of model.{model}'s query, key and value "
        yield Problem(key, f"{rule}projections", tp, good)
    width = "moe_ffn_hidden_size" if a.num_experts and a.moe_ffn_hidden_size else "ffn_hidden_size"
    if a.mlp_hidden_size % tp:
        yield Problem(key, f"must divide {size(width, a.mlp_hidden_size)}", tp, good)
