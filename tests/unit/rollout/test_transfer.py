"""Tensors arrive in buckets as they were sent; the sums that check them are exact."""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from torch import Tensor

from mindspeed_rlxf.rollout import bit_sums, transfer
from mindspeed_rlxf.rollout.bit_sums import BLOCK, bit_sum, block_sums
from mindspeed_rlxf.rollout.transfer import make_buckets
from tests.unit.rollout.on_device import on_device

DTYPES = (torch.bfloat16, torch.float32)


def of_bits(random: np.ndarray, dtype: torch.dtype) -> Tensor:
    """Numbers of any bit pattern, nan among them."""
    return torch.from_numpy(random.astype(np.int64)).to(torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [2, 2 * BLOCK, 7 * BLOCK + 10])
def test_the_sums_are_those_of_whole_numbers(monkeypatch, dtype, count):
    monkeypatch.setattr(bit_sums, "SUMMED_AT_ONCE", 3 * BLOCK)
    random, halves = np.random.default_rng(count), dtype.itemsize // 2
    for patterns in (
        random.integers(-(2**15), 2**15, count * halves),
        np.full(count * halves, -(2**15)),  # the largest products, 2^24
        np.full(count * halves, 2**15 - 1) - (np.arange(count * halves) < halves),  # odd sums
    ):
        tensor, starts = of_bits(patterns, dtype), range(0, count, BLOCK)
        elements = tensor.view(torch.int32 if halves == 2 else torch.int16).numpy().astype(np.int64)
        blocks = [elements[n : n + BLOCK] for n in starts]
        numbers = np.arange(1, BLOCK + 1)
        expected = [int((block * numbers[: len(block)]).sum()) for block in blocks]
        assert block_sums(tensor).tolist() == expected
        parts = bit_sums._fp32_block_sums(on_device(tensor)).as_subclass(Tensor)
        assert parts.dtype is torch.float32
        assert bit_sums._whole_numbers(parts).tolist() == expected


@hypothesis.given(st.sampled_from(DTYPES), st.integers(0, 2**32 - 1), st.data())
def test_a_number_that_changes_changes_a_sum(dtype, seed, data):
    """Also where its bytes or halves change places."""
    random = np.random.default_rng(seed)
    patterns = random.integers(-(2**15), 2**15, 600)
    before = of_bits(patterns, dtype)
    halves = before.element_size() // 2
    number = data.draw(st.integers(0, before.numel() - 1)) * halves
    new = data.draw(st.lists(st.integers(-(2**15), 2**15 - 1), min_size=halves, max_size=halves))
    old = patterns[number : number + halves].copy()
    for other in (np.array(new), old[::-1], old.astype(np.int16).byteswap()):
        patterns[number : number + halves] = other
        same = bool((other == old).all())
        after = block_sums(of_bits(patterns, dtype))
        assert torch.equal(after, block_sums(before)) == same


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("others", [(3, 4), (3, 509), (3, BLOCK + 3), (0, BLOCK + 1), (9, 18)])
def test_elements_that_change_places_change_the_sum(dtype, others):
    tensor = torch.randn(2 * BLOCK, generator=torch.Generator().manual_seed(0)).to(dtype)
    tensor[others[1]] = -tensor[others[0]]  # they differ in their highest bit
    swapped = tensor.clone()
    swapped[list(others)] = tensor[list(others[::-1])]
    assert bit_sum(swapped) != bit_sum(tensor)
    order = torch.randperm(BLOCK, generator=torch.Generator().manual_seed(1))
    assert bit_sum(tensor[order]) != bit_sum(tensor[:BLOCK])


def test_the_host_waits_once_for_the_sums_of_a_bucket(monkeypatch):
    tensors = [torch.randn(700), torch.randn(40, 40).bfloat16(), torch.randn(3)]
    expected = [bit_sum(tensor) for tensor in tensors]
    waits = []
    for name in ("tolist", "item", "cpu", "__int__"):
        method = getattr(Tensor, name)
        count = lambda self, method=method: waits.append(1) or method(self)  # noqa: E731
        monkeypatch.setattr(Tensor, name, count)
    assert bit_sums.bit_sums(tensors) == expected
    assert len(waits) == 1


def test_a_bucket_has_tensors_up_to_its_size_or_a_single_larger_one(monkeypatch):
    monkeypatch.setattr(transfer, "BUCKET_BYTES", 24)
    shapes = {"a": (2, 3), "b": (6,), "c": (1,), "d": (5, 5), "e": (4, 2)}
    buckets = make_buckets(shapes, itemsize=2)  # 12, 12, 2, 50 and 16 bytes
    assert [list(bucket) for bucket in buckets] == [["a", "b"], ["c"], ["d"], ["e"]]
    assert {name: shape for bucket in buckets for name, shape in bucket.items()} == shapes


SHAPES = {"first": (3, 5), "second": (700,), "third": (40, 40)}


def transferred(
    monkeypatch: pytest.MonkeyPatch, tensors: dict[str, Tensor], change: Any = None
) -> dict[str, Tensor]:
    """Send and receive in one process. change: called with each flat bucket on its way"""
    monkeypatch.setattr(transfer, "BUCKET_BYTES", 4 * 1000)
    monkeypatch.setattr(transfer.device, "current_device", lambda: torch.device("cpu"))
    wire: list[Tensor] = []
    group: Any = None
    buckets = make_buckets(SHAPES, 4)

    def broadcast(tensor: Tensor, src: int, group: Any) -> None:
        assert tensor.is_contiguous()
        wire.append(tensor.clone())

    monkeypatch.setattr(transfer.dist, "broadcast", broadcast)
    transfer.send(iter(tensors.items()), buckets, "group")  # type: ignore[arg-type]
    if change:
        change(wire)
    monkeypatch.setattr(transfer.dist, "broadcast", lambda t, src, group: t.copy_(wire.pop(0)))
    return dict(transfer.receive(buckets, torch.float32, group))


def test_tensors_arrive_as_they_were_sent(monkeypatch):
    sent = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    sent["third"] = torch.randn(40, 80)[:, ::2]  # not contiguous, nor is a flat view of it
    arrived = transferred(monkeypatch, sent)
    assert list(arrived) == list(SHAPES)
    assert all(torch.equal(arrived[name], tensor) for name, tensor in sent.items())


def test_tensors_that_change_on_the_way_are_named(monkeypatch):
    def flip(wire: list[Tensor]) -> None:
        wire[0].view(torch.int32)[15 + 600] ^= 1 << 9

    sent = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    with pytest.raises(ValueError, match="the sums of their bits: second; look"):
        transferred(monkeypatch, sent, flip)
