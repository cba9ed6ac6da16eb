"""Key-value cache that grows with its rows, and the attention of prefill and decode.

Axes: slots = rows of the cache, groups = key-value groups that this tensor-parallel rank uses;
ranks that share a group each hold its keys and values. The active rows are always slots 0 .. n - 1,
so that one decode step computes exactly the active rows.

A layer's keys are one tensor [slots, groups, capacity, head_dim]. The capacity is the longest
active row, rounded up to pages of PAGE tokens: it grows a page at a time and shrinks when long rows
have ended. So a row takes memory for its present tokens, not for the most that it may have, and
attention reads whole tensors. The cache is copied once in PAGE steps, one layer after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_rlxf import device
from mindspeed_rlxf.config.memory import PAGE, round_to_pages
from mindspeed_rlxf.models.attention import Attend, PackedKernel, PackedSequences


@dataclass(frozen=True)
class CacheShape:
    """The size of one slot of the cache on this rank."""

    num_layers: int
    groups: int
    head_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token, in all layers."""
        return 2 * self.num_layers * self.groups * self.head_dim * self.dtype.itemsize


class KvCache:
    """The keys and values of all layers: [layer][slots, groups, capacity, head_dim]."""

    def __init__(self, shape: CacheShape, most: int, where: torch.device) -> None:
        """most: the most tokens that a row can have"""
        self.shape, self.most, self.slots, self.capacity = shape, most, 0, 0
        empty = (0, shape.groups, 0, shape.head_dim)
        layers = range(shape.num_layers)
        self.keys = [torch.zeros(empty, dtype=shape.dtype, device=where) for _ in layers]
        self.values = [torch.zeros_like(keys) for keys in self.keys]

    @property
    def nbytes(self) -> int:
        return self.slots * self.capacity * self.shape.token_bytes

    def fit(self, slots: int, length: int) -> None:
        """Resize the cache to `slots` rows of `length` tokens.

        A cache that is less than a page longer, and of at most twice the slots, stays as it is.
        Rows keep their tokens, up to the new capacity.
        """
        capacity = min(round_to_pages(length), self.most)
        if slots <= self.slots and capacity <= self.capacity <= capacity + PAGE:
            if 2 * slots > self.slots:
                return
            capacity = self.capacity
        kept = min(slots, self.slots), min(capacity, self.capacity)
        size = (slots, self.shape.groups, capacity, self.shape.head_dim)
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                # Zeros, because a mask does not hide NaN at places that a row has not reached.
                tensors[layer] = old.new_zeros(size)
                tensors[layer][: kept[0], :, : kept[1]] = old[: kept[0], :, : kept[1]]
                del old
        self.slots, self.capacity = slots, capacity

    def write(self, layer: int, slot: Tensor, position: Tensor, key: Tensor, value: Tensor) -> None:
        """Store key, value [tokens, groups, d] of the tokens at (slot, position)."""
        group = torch.arange(self.shape.groups, device=slot.device)
        self.put(layer, (slot[:, None], group, position[:, None]), key, value)

    def put(self, layer: int, place: tuple[Tensor, ...], key: Tensor, value: Tensor) -> None:
        """Store key and value at (slot, group, position), each of a shape that broadcasts."""
        self.keys[layer - 1][place] = key
        self.values[layer - 1][place] = value

    def copy(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first `length` positions of slots to others. source, target: [rows] int64"""
        for tensor in (*self.keys, *self.values):
            tensor[target, :, :length] = tensor[source, :, :length]


@dataclass
class Prefill(PackedSequences):
    """Attention of whole packed prompts, whose keys and values are written to the cache."""

    cache: KvCache = None  # type: ignore[assignment]
    slot: Tensor = None  # type: ignore[assignment]  # [tokens]
    position: Tensor = None  # type: ignore[assignment]  # [tokens]

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        fused: PackedKernel | None = None,
    ) -> Tensor:
        self.cache.write(layer, self.slot, self.position, key, value)
        return super().attend(layer, query, key, value, fused)


@dataclass
class DecodeStep(Attend):
    """Attention of one new token for each of the slots 0 .. n - 1, over all tokens of its slot.

    Every device uses torch's own attention: the NPU's fused one is made for training, and those for
    inference support neither fp32 nor a cache of this form.
    """

    cache: KvCache = None  # type: ignore[assignment]
    position: Tensor = None  # type: ignore[assignment]  # [n] position of the new token, < capacity

    def __post_init__(self) -> None:
        where, shape = self.position.device, self.cache.shape
        places = torch.arange(self.cache.capacity, device=where)
        visible = places <= self.position[:, None]
        if not device.fuses_layers():
            # Made once here; torch would convert a mask of bool in every layer.
            hidden = torch.zeros(visible.shape, dtype=shape.dtype, device=where)
            visible = hidden.masked_fill_(~visible, float("-inf"))
        self._mask = visible[:, None, None, :]  # [n, 1, 1, capacity]
        slot = torch.arange(len(self.position), device=where)
        group = torch.arange(shape.groups, device=where)
        self._place = slot[:, None], group, self.position[:, None]

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        fused: PackedKernel | None = None,
    ) -> Tensor:
        """Store the new token's key and value of each row, and attend to all tokens of its slot.

        query: [n, heads, d] or [n, groups, heads of a group, d]; the result has as many axes
        """
        rows, groups = key.size(0), key.size(1)
        self.cache.put(layer, self._place, key, value)
        keys, values = self.cache.keys[layer - 1], self.cache.values[layer - 1]
        if rows < self.cache.slots:
            keys, values = keys[:rows], values[:rows]
        # The queries of a group take the sequence axis: so no key is copied for them, and scores
        # stay fp32 inside the kernel.
        queries = query if query.dim() == 4 else query.unflatten(1, (groups, -1))
        # A row of the mask for each query: before CANN 9.1 an NPU's attention does not repeat one.
        mask = self._mask.expand(-1, -1, queries.size(2), -1)
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        return out if query.dim() == 4 else out.flatten(1, 2)
