"""Rules about dividing a model's heads, key-value groups and MLP among tensor-parallel ranks.

With at most as many ranks as groups every rank has whole groups. With more ranks, possible since
megatron-core 0.16, several ranks share a group, each with its own query heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from mindspeed_rlxf.config.architecture import ArchitectureConfig
from mindspeed_rlxf.config.errors import Problem, ref
from mindspeed_rlxf.config.suggest import divisors, neighbours, use

SHARED_GROUPS_SINCE = (0, 16)
"""First release of megatron-core in which ranks can share a key-value group."""


def groups_per_rank(groups: int, tp: int) -> int:
    """Return the number of key-value groups of a rank: 1 where several ranks share a group."""
    return max(1, groups // tp)


def qkv_rows(a: ArchitectureConfig) -> int:
    """Return the number of rows of the query, key and value weights together, on all ranks."""
    return (a.num_attention_heads + 2 * a.kv_heads) * a.head_dim


def whole_groups(a: ArchitectureConfig, tp: int) -> bool:
    """Return whether `tp` ranks can divide the key-value groups equally."""
    return a.kv_heads % tp == 0 or tp % a.kv_heads == 0


def possible_sizes(a: ArchitectureConfig) -> list[int]:
    """List the tensor-parallel sizes that `find_uneven` allows for a model, ascending."""
    common = gcd(a.num_attention_heads, a.mlp_hidden_size)
    return [tp for tp in divisors(common) if whole_groups(a, tp) and qkv_rows(a) % tp == 0]


def find_uneven(
    key: str, tp: int, a: ArchitectureConfig, model: str, section: str = ""
) -> Iterator[Problem]:
    """Yield a problem for each rule that a tensor-parallel size breaks for a model.

    It must divide the attention heads, the rows of the query, key and value projections (checked if
    heads and groups fit) and the width of the MLP or expert, and divide the key-value groups or be
    a multiple of them.
    key:     configuration key that sets `tp`
    model:   name of the architecture `a`
    section: prefix of the keys `architecture.*` in the problems, as "actor_rollout."
    """
    good = use(neighbours(tp, possible_sizes(a)))
    width = "moe_ffn_hidden_size" if a.num_experts and a.moe_ffn_hidden_size else "ffn_hidden_size"
    heads, groups, mlp = (
        f"{ref(f'{section}architecture.{name}')}={size}"
        for name, size in (
            ("num_attention_heads", a.num_attention_heads),
            ("num_query_groups", a.kv_heads),
            (width, a.mlp_hidden_size),
        )
    )
    splits_heads, whole = a.num_attention_heads % tp == 0, whole_groups(a, tp)
    rows = f"the {qkv_rows(a)} rows of model.{model}'s query, key and value projections"
    checks = {
        f"must divide {heads}": splits_heads,
        f"must divide {groups}, or be a multiple of it": whole,
        f"must divide {rows}": not (splits_heads and whole) or qkv_rows(a) % tp == 0,
        f"must divide {mlp}": a.mlp_hidden_size % tp == 0,
    }
    for rule in (rule for rule, holds in checks.items() if not holds):
        yield Problem(key, rule, tp, good)
