"""Predicted memory of generation: the rows of `docs/memory.md` about it, and its limits.

itemsize: bytes of a weight or an activation (2 in bf16, 4 in fp32)
a:        architecture of the model
tp:       tensor-parallel size
Results are for one rank.
"""

from __future__ import annotations

from mindspeed_rlxf.config.architecture import ArchitectureConfig
from mindspeed_rlxf.config.memory import FP32
from mindspeed_rlxf.config.rules.tensor_parallel import groups_per_rank

CACHE_SHARE = 0.3  # of a device's memory, for the KV cache where the number of rows is left open
PREFILL_TOKENS = 16384  # tokens of one prefill pass at most (one row at least)
EXCHANGE_TOKENS = 4096  # that the ranks of an expert-parallel group exchange at once, together
PAGE = 64  # tokens by which the KV cache of a row grows
GROWTH = 2 * PAGE  # tokens that a row has room for when it enters a cache of limited size


def round_to_pages(length: int) -> int:
    """Return a number of tokens rounded up to whole pages of the KV cache."""
    return -(-length // PAGE) * PAGE


def kv_cache_bytes(tokens: int, a: ArchitectureConfig, tp: int, itemsize: int) -> int:
    """Return the bytes of the keys and values of `tokens` tokens on a rank, over all layers.

    The groups are divided by `tp`; one that several ranks share counts in full on each.
    """
    groups = groups_per_rank(a.kv_heads, tp)
    return 2 * tokens * a.num_layers * groups * a.head_dim * itemsize


def kv_cache_tokens(token_bytes: int, memory: int | None) -> int | None:
    """Return how many tokens the KV cache may hold without `num_samples_per_step`; None = no limit.

    token_bytes: of the keys and values of one token
    memory:      bytes of a device, of which the cache may take CACHE_SHARE; None = not known
    """
    return None if memory is None else int(CACHE_SHARE * memory) // token_bytes


def kv_cache_rows(
    limit: int | None, waiting: int, prompt: int, response: int, tokens: int | None
) -> int:
    """Return how many sequences a rank generates at the same time, at most `waiting`.

    limit:   num_samples_per_step, not compared with the cache; None = as many as fit into `tokens`
             with a prompt and half a response each, rounded up to pages, at least one. Rows begin
             short; once the cache is full the shortest rows wait
    waiting: sequences to generate
    prompt, response: longest of each, in tokens
    tokens:  size of the cache in tokens; None = no limit
    """
    if limit is None:
        row = min(round_to_pages(prompt + response // 2), prompt + response)
        limit = waiting if tokens is None else max(1, tokens // row)
    return min(limit, waiting)


def kv_cache_most_tokens(rows: int, length: int, tokens: int | None) -> int:
    """Return the most tokens that the KV cache of `rows` sequences of up to `length` tokens takes.

    tokens: limit of the cache, which always holds one sequence; None = no limit
    """
    return rows * length if tokens is None else min(rows * length, max(tokens, length))


def prefill_tokens(rows: int, longest: int) -> int:
    """Return the tokens of the largest prefill pass over `rows` sequences.

    longest: tokens of a sequence at its prefill: the prompt, and the response so far if it waited
    """
    return min(rows * longest, max(PREFILL_TOKENS, longest))


def exchange_bytes(a: ArchitectureConfig, tokens: int, tp: int, ep: int, itemsize: int) -> int:
    """Return the bytes, beside weights, of a layer's experts in generation, shared by `ep` ranks.

    For all tokens: the routing and the results. For the tokens of one exchange (of all ranks,
    together about EXCHANGE_TOKENS at most): themselves, and their results in fp32. In addition, for
    each expert that such a token is sent to, 40 bytes to sort by and the largest of these three:
    the result, and again in fp32; a hidden state and two parts of the gated MLP; three parts of the
    MLP, and one of them again in fp32.
    tokens: of the rank that has the most
    """
    routing = 5 * (a.num_experts or 0) + 20 * a.moe_router_topk
    own = tokens * (a.hidden_size * itemsize + routing)
    together = ep * min(tokens, max(1, EXCHANGE_TOKENS // ep))
    width = a.mlp_hidden_size // tp
    result = a.hidden_size * (itemsize + FP32)
    widened = a.hidden_size * itemsize + 2 * width * itemsize
    choice = 40 + max(result, widened, width * (3 * itemsize + FP32))
    gathered = together * a.hidden_size * (itemsize + FP32)
    return own + gathered + together * a.moe_router_topk * choice


def sampling_bytes(rows: int, vocab: int, do_sample: bool, sorts: bool = False) -> int:
    """Return the peak bytes of choosing the next token of each row.

    Greedy: 3 fp32 arrays: logits, scaled logits, log-softmax. Sampling: 7, with the filtered
    logits and weights. With top_p also token ids of 8 bytes.
    vocab: the whole vocabulary, which every tensor-parallel rank gathers
    sorts: whether top_p is below 1
    """
    return rows * vocab * ((7 if do_sample else 3) * FP32 + (8 if sorts else 0))


def row_state_bytes(rows: int, response: int) -> int:
    """Return the bytes of the token ids, log-probs and random numbers of responses on the device.

    8, 4 and 4 bytes for each of response + 1 positions of a row.
    """
    return 16 * rows * (response + 1)
