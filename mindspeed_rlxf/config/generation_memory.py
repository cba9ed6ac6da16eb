"""Size of the KV cache, and how many rows generate at once; for the plan and the rollout."""

from mindspeed_rlxf.config.architecture import ArchitectureConfig, groups_per_rank

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
