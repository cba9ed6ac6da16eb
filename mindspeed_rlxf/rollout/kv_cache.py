"""Key-value cache of a fixed number of rows, with the attention of prefill and decode.

Axes: slots = rows of the cache, groups = key-value groups that this tensor-parallel rank attends
with; ranks that share a group each hold its keys and values. The active rows are always slots
0 .. n - 1, so that one decode step computes exactly the active rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_rlxf.models.attention import Attend, PackedKernel, PackedSequences


@dataclass(frozen=True)
class CacheShape:
    """The size of one slot of the cache on this rank."""

    num_layers: int
    groups: int
    max_length: int  # tokens
    head_dim: int
    dtype: torch.dtype

    @property
    def slot_bytes(self) -> int:
        """Bytes of the keys and values of one sequence."""
        numbers = 2 * self.num_layers * self.groups * self.max_length * self.head_dim
        return numbers * self.dtype.itemsize


class KvCache:
    """The keys and values of all layers: [layer][slots * groups, max_length, head_dim]."""

    def __init__(self, shape: CacheShape, slots: int, device: torch.device) -> None:
        self.groups, self.max_length, self.slots = shape.groups, shape.max_length, slots
        size = (shape.num_layers, slots * shape.groups, shape.max_length, shape.head_dim)
        # Zeros: a mask hides places that a row has not reached, but not NaN of unset memory.
        self.keys = torch.zeros(size, dtype=shape.dtype, device=device)
        self.values = torch.zeros(size, dtype=shape.dtype, device=device)

    def write(self, layer: int, slot: Tensor, position: Tensor, key: Tensor, value: Tensor) -> None:
        """Store key, value [tokens, groups, d] of the tokens at (slot, position)."""
        row = slot[:, None] * self.groups + torch.arange(self.groups, device=slot.device)
        at = position[:, None].expand_as(row)
        self.keys[layer - 1][row, at] = key
        self.values[layer - 1][row, at] = value

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another."""
        g = self.groups
        for cache in (self.keys, self.values):
            rows = cache[:, source * g : (source + 1) * g, :length]
            cache[:, target * g : (target + 1) * g, :length] = rows


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
    position: Tensor = None  # type: ignore[assignment]  # [n] position of the new token
    _visible: Tensor = field(init=False)  # [n, 1, 1, length] bool

    def __post_init__(self) -> None:
        self._length = int(self.position.max()) + 1
        places = torch.arange(self._length, device=self.position.device)
        self._visible = (places[None, :] <= self.position[:, None])[:, None, None, :]
        self._slot = torch.arange(len(self.position), device=self.position.device)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        fused: PackedKernel | None = None,
    ) -> Tensor:
        """Store the new token's key and value of each row, and attend to all in its slot."""
        rows, heads, head_dim = query.shape
        groups = key.size(1)
        self.cache.write(layer, self._slot, self.position, key, value)
        keys, values = (
            stored[layer - 1][: rows * groups, : self._length].unflatten(0, (rows, groups))
            for stored in (self.cache.keys, self.cache.values)
        )
        # The queries of a group stand where a sequence would: no key is copied for them, and scores
        # stay fp32 inside the kernel.
        queries = query.reshape(rows, groups, heads // groups, head_dim)
        # A row of the mask for each query: before CANN 9.1 an NPU's attention does not repeat one.
        visible = self._visible.expand(-1, -1, heads // groups, -1)
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=visible)
        return out.reshape(rows, heads, head_dim)
