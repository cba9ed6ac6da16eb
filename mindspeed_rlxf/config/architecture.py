"""A model's architecture: `model.<name>` in the YAML."""

from collections.abc import Iterator
from math import gcd
from typing import Literal

from mindspeed_rlxf.config.fields import Section, free, key
from mindspeed_rlxf.config.problems import Problem, at_most, divides, divisors, neighbours, ref, use

EXPERTS = "num_experts"
"""Condition for expert keys, see `unused`."""

# Upper limits, above any real model: checking a config allocates memory by them.
MOST_LAYERS = 10_000
MOST_EXPERTS = 10_000
MOST_WIDTH = 2**22
MOST_TOKENS = 2**27
MOST_POSITIONS = 2**31


class ArchitectureConfig(Section):
    """A Llama, Qwen or Mixtral decoder in Megatron's names.

    With `num_experts` every layer's MLP is a mixture of experts.
    """

    num_layers: int = key(..., "transformer layers", ge=1, le=MOST_LAYERS)
    hidden_size: int = key(..., "width of the residual stream", ge=1, le=MOST_WIDTH)
    ffn_hidden_size: int = key(..., "width of the gated MLP", ge=1, le=MOST_WIDTH)
    num_attention_heads: int = key(..., "query heads", ge=1, le=MOST_WIDTH)
    num_query_groups: int | None = key(
        None, "key and value heads; null = one per query head", ge=1, le=MOST_WIDTH
    )
    kv_channels: int | None = key(
        None, "width of a head; null = hidden_size / heads", ge=1, le=MOST_WIDTH
    )
    vocab_size: int = key(..., "tokens of the checkpoint's embedding", ge=1, le=MOST_TOKENS)
    max_position_embeddings: int = key(..., "longest sequence, tokens", ge=1, le=MOST_POSITIONS)
    rotary_base: float = key(10000.0, "rotary base frequency", gt=0)
    rope_scaling_type: Literal["linear", "llama3"] | None = key(None, "rotary scaling; null = off")
    rope_scaling_factor: float = key(
        1.0, "how far rotary positions are stretched", ge=1, used_if="rope_scaling_type"
    )
    low_freq_factor: float = key(
        1.0, "llama3 scaling: low frequency bound", gt=0, used_if="rope_scaling_type=llama3"
    )
    high_freq_factor: float = key(
        4.0, "llama3 scaling: high frequency bound", gt=0, used_if="rope_scaling_type=llama3"
    )
    original_max_position_embeddings: int | None = key(
        None,
        "llama3 scaling: longest sequence before stretching, tokens",
        ge=1,
        le=MOST_POSITIONS,
        used_if="rope_scaling_type=llama3",
    )
    add_qkv_bias: bool = key(False, "query, key and value projections have a bias (Qwen2)")
    qk_layernorm: bool = key(False, "queries and keys of each head are normed (Qwen3)")
    norm_epsilon: float = key(1e-5, "RMSNorm epsilon", gt=0)
    untie_embeddings_and_output_weights: bool = key(False, "output layer has its own weights")
    init_method_std: float = key(0.02, "standard deviation of a new score head", gt=0)
    num_experts: int | None = key(
        None, "experts of each layer; null = one dense MLP", ge=2, le=MOST_EXPERTS
    )
    moe_router_topk: int = key(
        2, "experts that compute a token", ge=1, le=MOST_EXPERTS, only_if=EXPERTS
    )
    moe_ffn_hidden_size: int | None = key(
        None, "width of one expert; null = ffn_hidden_size", ge=1, le=MOST_WIDTH, only_if=EXPERTS
    )
    moe_router_pre_softmax: bool = key(
        False,
        "weights of chosen experts sum to less than 1 (norm_topk_prob: false)",
        only_if=EXPERTS,
    )
    moe_router_load_balancing_type: Literal["aux_loss", "none"] = free(
        "aux_loss", "aux_loss or none", only_if=EXPERTS
    )
    moe_aux_loss_coeff: float = free(
        0.0,
        "weight of the load-balancing loss",
        ge=0,
        only_if=f"moe_router_load_balancing_type=aux_loss; {EXPERTS}",
    )

    @property
    def kv_heads(self) -> int:
        """Number of key heads, and equally value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """One head's width."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def mlp_hidden_size(self) -> int:
        """Inner width: a dense layer's MLP, or one expert with `num_experts`."""
        return (self.num_experts and self.moe_ffn_hidden_size) or self.ffn_hidden_size

    @property
    def balances_experts(self) -> bool:
        """Whether training adds the expert load-balancing loss."""
        has_loss = self.moe_router_load_balancing_type == "aux_loss" and self.moe_aux_loss_coeff > 0
        return self.num_experts is not None and has_loss

    def _broken_rules(self) -> Iterator[Problem]:
        heads = self.num_attention_heads
        width = self.hidden_size
        if self.kv_channels is None and width % heads:
            rule = f"must divide hidden_size={width} where kv_channels is not given"
            yield Problem(
                "num_attention_heads", rule, heads, use(neighbours(heads, divisors(width)))
            )
        elif self.head_dim % 2:
            rule = f"the head width {self.head_dim} must be even for rotary positions"
            yield Problem("kv_channels", rule, remedy="change it", colon=True)
        yield from divides("num_query_groups", self.kv_heads, f"num_attention_heads={heads}", heads)
        if self.rope_scaling_type == "llama3" and self.original_max_position_embeddings is None:
            key = "original_max_position_embeddings"
            yield Problem(key, "is required with rope_scaling_type=llama3")
        experts = self.num_experts
        topk = self.moe_router_topk
        if experts is not None:
            yield from at_most("moe_router_topk", topk, f"num_experts={experts}", experts)
        if experts is not None and topk == 1 and not self.moe_router_pre_softmax:
            # Else every expert's weight is 1, and the router is not trained.
            rule = "needs moe_router_pre_softmax=true"
            yield Problem("moe_router_topk", rule, 1, "use that, or 2 experts")


SHARED_GROUPS_SINCE = (0, 16)
"""First megatron-core release with key-value groups shared between ranks."""


def groups_per_rank(groups: int, tp: int) -> int:
    """Return a rank's key-value groups: 1 if several ranks share a group."""
    return max(1, groups // tp)


def qkv_rows(a: ArchitectureConfig) -> int:
    """Return the rows in query, key and value weights together, over all ranks."""
    return (a.num_attention_heads + 2 * a.kv_heads) * a.head_dim


def whole_groups(a: ArchitectureConfig, tp: int) -> bool:
    """Return whether `tp` ranks can divide the key-value groups equally."""
    return a.kv_heads % tp == 0 or tp % a.kv_heads == 0


def possible_sizes(a: ArchitectureConfig) -> list[int]:
    """List a model's legal tensor-parallel sizes (`find_uneven`), ascending."""
    common = gcd(a.num_attention_heads, a.mlp_hidden_size)
    return [tp for tp in divisors(common) if whole_groups(a, tp) and qkv_rows(a) % tp == 0]


def find_uneven(
    key: str, tp: int, a: ArchitectureConfig, model: str, section: str = ""
) -> Iterator[Problem]:
    """Yield a problem for each rule broken by a tensor-parallel size.

    Args:
        key: Configuration key behind `tp`.
        tp: Tensor-parallel size.
        a: Architecture.
        model: The architecture's name.
        section: Prefix for `architecture.*` keys in problems, such as "actor_rollout.".
    """
    good = use(neighbours(tp, possible_sizes(a)))
    width = "moe_ffn_hidden_size" if a.num_experts and a.moe_ffn_hidden_size else "ffn_hidden_size"
    heads = ref(f"{section}architecture.num_attention_heads")
    groups = ref(f"{section}architecture.num_query_groups")
    mlp = ref(f"{section}architecture.{width}")
    splits_heads = a.num_attention_heads % tp == 0
    splits_groups = whole_groups(a, tp)
    if not splits_heads:
        yield Problem(key, f"must divide {heads}={a.num_attention_heads}", tp, good)
    if not splits_groups:
        rule = f"must divide {groups}={a.kv_heads}, or be a multiple of it"
        yield Problem(key, rule, tp, good)
    if splits_heads and splits_groups and qkv_rows(a) % tp:
        rows = f"the {qkv_rows(a)} rows of model.{model}'s query, key and value projections"
        yield Problem(key, f"must divide {rows}", tp, good)
    if a.mlp_hidden_size % tp:
        yield Problem(key, f"must divide {mlp}={a.mlp_hidden_size}", tp, good)
