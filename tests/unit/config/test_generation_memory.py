"""The size of the KV cache and its rows, worked out by hand."""

from mindspeed_rlxf.config.generation_memory import (
    kv_cache_bytes,
    kv_cache_rows,
    kv_cache_tokens,
    round_to_pages,
)
from tests.unit.ops.planning.test_stage import MODEL


def test_a_cache_holds_the_groups_of_a_rank():
    # 2 x 72 tokens x 4 layers x (4 / 2) groups x 16 x 2 bytes
    assert kv_cache_bytes(72, MODEL, 2, 2) == 36864
    assert kv_cache_bytes(72, MODEL, 8, 2) == 36864 // 2, "two ranks share a group; each caches it"


def test_a_cache_takes_a_part_of_the_known_memory():
    assert kv_cache_tokens(10, 1000) == 30  # 0.3 of 1000 bytes, 10 a token
    assert kv_cache_tokens(10, None) is None
    assert [round_to_pages(n) for n in (1, 64, 65)] == [64, 64, 128]


def test_rows_are_those_that_are_wanted_or_fit():
    assert kv_cache_rows(5, 40, 100, 60, 10) == 5
    assert kv_cache_rows(50, 40, 100, 60, None) == 40
    assert kv_cache_rows(None, 40, 100, 60, None) == 40
    # A row counts with half a response: 100 + 30 tokens are 3 pages, more than the row's 160.
    assert kv_cache_rows(None, 40, 100, 60, 500) == 3
    assert kv_cache_rows(None, 40, 100, 3000, 4800) == 3  # 100 + 1500 tokens are 25 pages
    assert kv_cache_rows(None, 40, 100, 60, 10) == 1, "one row in any case"
