"""KV cache size, and how many rows generate at once; for the plan and the rollout."""

from dataclasses import dataclass

from mindspeed_rlxf.config.architecture import ArchitectureConfig, groups_per_rank

CACHE_SHARE = 0.3  # of a device's memory, for the KV cache where the number of rows is left open
PREFILL_TOKENS = 16384  # tokens of one prefill pass at most (one row at least)
EXCHANGE_TOKENS = 4096  # that the ranks of an expert-parallel group exchange at once, together
PAGE = 64  # tokens by which the KV cache of a row grows
GROWTH = 2 * PAGE  # tokens that a row has room for when it enters a cache of limited size


@dataclass(frozen=True)
class Capacities:
    """The most that a replica generates at a time, whatever its requests."""

    prompt: int  # tokens of a prompt
    response: int  # tokens of a response
    samples: int


def round_to_pages(length: int) -> int:
    """Round a token count up to whole KV cache pages."""
    return -(-length // PAGE) * PAGE


def kv_cache_bytes(tokens: int, a: ArchitectureConfig, tp: int, itemsize: int) -> int:
    """Return a rank's bytes for the keys and values of `tokens` tokens, over all layers.

    `tp` divides the groups; a group shared by several ranks counts in full on each.
    """
    groups = groups_per_rank(a.kv_heads, tp)
    return 2 * tokens * a.num_layers * groups * a.head_dim * itemsize


def kv_cache_tokens(token_bytes: int, memory: int | None) -> int | None:
    """Return the KV cache's capacity in tokens without `num_samples_per_step`; None = no limit.

    Args:
        token_bytes: Keys and values per token.
        memory: Device bytes, of which the cache may take CACHE_SHARE; None = not known.
    """
    return None if memory is None else int(CACHE_SHARE * memory) // token_bytes


def kv_cache_rows(
    limit: int | None, waiting: int, prompt: int, response: int, tokens: int | None
) -> int:
    """Return how many sequences a rank generates at the same time, at most `waiting`.

    Args:
        limit: `num_samples_per_step`, not compared with the cache. None = as many as fit into
            `tokens` with a prompt and half a response each, rounded up to pages, at least one: rows
            begin short, and in a full cache the shortest rows wait.
        waiting: Sequences to generate.
        prompt: Longest prompt in tokens.
        response: Longest response in tokens.
        tokens: Cache size in tokens; None = no limit.
    """
    if limit is None:
        row = min(round_to_pages(prompt + response // 2), prompt + response)
        limit = waiting if tokens is None else max(1, tokens // row)
    return min(limit, waiting)
