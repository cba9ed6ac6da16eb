"""Prefill and decode through the cache against causal attention over the whole sequence."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from mindspeed_rlxf.config import generation_memory
from mindspeed_rlxf.models.attention import PackedSequences
from mindspeed_rlxf.rollout import kv_cache
from mindspeed_rlxf.rollout.kv_cache import CacheShape, DecodeStep, KvCache, Prefill

LAYERS, HEADS, GROUPS, DIM = 2, 4, 2, 8


@pytest.fixture(autouse=True)
def unset_memory_is_nan() -> Iterator[None]:
    """torch fills new memory with nan while deterministic algorithms are asked for."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


CPU = torch.device("cpu")


def new_cache(num_rows: int, max_length: int = 16) -> KvCache:
    cache = KvCache(CacheShape(LAYERS, GROUPS, DIM, torch.float64), max_length, CPU)
    cache.fit(num_rows, max_length)
    return cache


def random_tokens(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heads = (HEADS, GROUPS, GROUPS)
    query, key, value = (
        torch.randn(count, h, DIM, generator=generator, dtype=torch.float64) for h in heads
    )
    return query, key, value


def prefill(
    cache: KvCache, layer: int, qkv: list[tuple[Tensor, ...]], lengths: list[int], first: int = 0
) -> Tensor:
    """The first lengths[i] tokens of sequence i into row first + i."""
    tokens = [x[:n] for parts, n in zip(qkv, lengths, strict=True) for x in parts]
    rows = torch.arange(first, first + len(lengths))
    attend = Prefill(
        lengths=tuple(lengths),
        cache=cache,
        cache_row=rows.repeat_interleave(torch.tensor(lengths)),
        position=torch.cat([torch.arange(n) for n in lengths]),
    )
    query, key, value = (torch.cat(tokens[i::3]) for i in range(3))
    return attend.attend(layer, query, key, value)


def decode(cache: KvCache, layer: int, qkv: list[tuple[Tensor, ...]], places: list[int]) -> Tensor:
    """Token places[i] of the sequence in row i."""
    query, key, value = (
        torch.stack([parts[i][p] for parts, p in zip(qkv, places, strict=True)]) for i in range(3)
    )
    step = DecodeStep(cache=cache, position=torch.tensor(places))
    return step.attend(layer, query, key, value)


@pytest.mark.parametrize("layer", [1, 2])
def test_prefill_then_decode_is_causal_attention_of_the_whole_sequence(layer):
    prompts, total = [3, 7, 1], 10
    qkv = [random_tokens(total, seed) for seed in range(3)]
    whole = [PackedSequences(lengths=(total,)).attend(layer, *parts) for parts in qkv]
    cache = new_cache(num_rows=3)
    out = prefill(cache, layer, qkv, prompts)
    expected = torch.cat([w[:n] for w, n in zip(whole, prompts, strict=True)])
    assert_close(out, expected)
    for step in range(3):
        places = [n + step for n in prompts]
        out = decode(cache, layer, qkv, places)
        assert_close(out, torch.stack([w[p] for w, p in zip(whole, places, strict=True)]))


def test_scores_of_a_decode_step_are_not_rounded_to_low_precision():
    # raw scores 256 and 257, which bf16 cannot tell apart; head_dim 4: their softmax is that of
    # 0 and 1 / sqrt(4), so that the second key weighs 1 / (1 + exp(-0.5)) = 0.62246
    cache = KvCache(CacheShape(1, 1, 4, torch.bfloat16), 2, CPU)
    cache.fit(1, 2)
    rows = torch.tensor([[[16.0, 0, 0, 0]], [[16.0, 1, 0, 0]]]).bfloat16()
    values = torch.tensor([[[0.0, 0, 0, 0]], [[1.0, 1, 1, 1]]]).bfloat16()
    first = torch.tensor([[0]])
    cache.write(1, (first, first[0], first), rows[:1], values[:1])
    query = torch.tensor([[[16.0, 1, 0, 0]]]).bfloat16()
    out = DecodeStep(cache=cache, position=torch.tensor([1])).attend(1, query, rows[1:], values[1:])
    assert_close(out, torch.full((1, 1, 4), 0.62246).bfloat16())


def test_a_decode_step_asks_the_operator_of_an_npu_that_works(monkeypatch):
    """With the query of a row on an axis of one token, and a mask that is True where hidden."""
    asked: list[Any] = []

    def attend_to_cache(query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
        assert hidden.dtype is torch.bool and hidden.shape == (2, 1, 1, keys.size(2))
        assert all(tensor.is_contiguous() for tensor in (query, keys, values, hidden))
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=~hidden, enable_gqa=True
        )

    def find(operator: Any, *shape: int) -> Any:
        asked.append((operator, shape))
        return attend_to_cache

    cache = KvCache(CacheShape(1, GROUPS, DIM, torch.bfloat16), 8, CPU)
    cache.fit(3, 4)
    heads = 2 * GROUPS
    query, key, value = (torch.randn(2, n, DIM).bfloat16() for n in (heads, GROUPS, GROUPS))
    position = torch.tensor([0, 2])
    plain = DecodeStep(cache=cache, position=position).attend(1, query, key, value)
    monkeypatch.setattr(kv_cache.device, "fuses_layers", lambda: True)
    monkeypatch.setattr(kv_cache.kernels, "find", find)
    step = DecodeStep(cache=cache, position=position)
    grouped = query.unflatten(1, (GROUPS, -1))
    for each in (query, grouped):
        found = step.attend(1, each, key, value)
        assert found.shape == each.shape
        assert_close(found.view(query.shape), plain, rtol=0.02, atol=0.02)
    assert asked == [(kv_cache.kernels.Operator.DECODE, (heads, GROUPS, DIM))] * 2


def test_a_cache_grows_by_pages_and_keeps_what_its_rows_hold(monkeypatch):
    monkeypatch.setattr(generation_memory, "PAGE", 4)
    monkeypatch.setattr(kv_cache, "PAGE", 4)
    cache = KvCache(CacheShape(LAYERS, GROUPS, DIM, torch.float64), 19, CPU)
    qkv = [random_tokens(19, seed) for seed in range(3)]
    cache.fit(3, 3)
    sizes = [(cache.num_rows, cache.capacity)]
    prefill(cache, 2, qkv, [2, 3, 1])
    for rows, length in ((3, 4), (3, 5), (3, 8), (2, 19), (2, 17), (2, 13), (2, 9), (1, 9)):
        cache.fit(rows, length)
        sizes.append((cache.num_rows, cache.capacity))
    # Pages of 4, 19 tokens at most. 13 tokens need 16, 9 need 12: one page more is kept, two are
    # not; neither are rows of which half are free.
    assert sizes == [(3, 4), (3, 4), (3, 8), (3, 8), (2, 19), (2, 19), (2, 19), (2, 12), (1, 12)]
    whole = PackedSequences(lengths=(19,)).attend(1, *qkv[0])
    assert_close(decode(cache, 2, qkv[:1], [2]), whole[2:3])
    assert not any(x[:, :, 3:].any() for x in cache.keys), "new places hold zeros"
