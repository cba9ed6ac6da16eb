"""Key-value cache that grows with its rows, and the attention of prefill and decode.

Axes: slots = rows of the cache, groups = key-value groups that this tensor-parallel rank uses;
ranks that share a group each have its keys and values. The rows of the batch are always slots
0 .. n - 1, so that a decode step computes these rows and no others.

A layer's keys are one tensor [slots, groups, capacity, head_dim]. The capacity is the length of the
longest row, rounded up to pages of PAGE tokens: it grows a page at a time and shrinks when long
rows have ended. So a row takes memory for the tokens of the longest row now, not for the most
tokens that it may have. The cache is copied once in PAGE steps, one layer after the other.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_rlxf import device
from mindspeed_rlxf.config.generation_memory import PAGE, round_to_pages
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

    def __init__(self, shape: CacheShape, max_length: int, where: torch.device) -> None:
        """Make a cache without slots on the device `where`.

        max_length: the most tokens that a row can have, and the largest capacity
        """
        self.shape, self.max_length, self.slots, self.capacity = shape, max_length, 0, 0
        empty = (0, shape.groups, 0, shape.head_dim)
        layers = range(shape.num_layers)
        self.keys = [torch.zeros(empty, dtype=shape.dtype, device=where) for _ in layers]
        self.values = [torch.zeros_like(keys) for keys in self.keys]

    def fit(self, slots: int, length: int) -> None:
        """Reallocate the cache for `slots` rows of `length` tokens, rounded up to pages.

        The first `slots` rows keep their keys and values, as far as the new capacity goes. A cache
        that is large enough stays unchanged, unless it is over a page longer than needed, or has
        twice the slots or more.
        """
        capacity = min(round_to_pages(length), self.max_length)
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

    def write(self, layer: int, index: tuple[Tensor, ...], key: Tensor, value: Tensor) -> None:
        """Store the key and value of each token.

        layer:      number of the layer, from 1
        index:      (slot, group, position), int64 tensors that broadcast to [tokens, groups]
        key, value: [tokens, groups, head_dim]
        """
        self.keys[layer - 1][index] = key
        self.values[layer - 1][index] = value

    def copy(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first `length` positions of slots `source` to slots `target`, in all layers."""
        for tensor in (*self.keys, *self.values):
            tensor[target, :, :length] = tensor[source, :, :length]


@dataclass
class Prefill(PackedSequences):
    """Attention of whole packed rows, whose keys and values are written to the cache."""

    cache: KvCache = None  # type: ignore[assignment]
    slot: Tensor = None  # type: ignore[assignment]  # [tokens] int64, slot of each token's row
    position: Tensor = None  # type: ignore[assignment]  # [tokens] int64, in the row

    def __post_init__(self) -> None:
        super().__post_init__()
        group = torch.arange(self.cache.shape.groups, device=self.slot.device)
        self._places = self.slot[:, None], group, self.position[:, None]

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        fused: PackedKernel | None = None,
    ) -> Tensor:
        """Write keys and values to the cache, then attend as `PackedSequences.attend`."""
        self.cache.write(layer, self._places, key, value)
        return super().attend(layer, query, key, value, fused)


@dataclass
class DecodeStep(Attend):
    """Attention of one new token for each of the slots 0 .. n - 1, over all tokens of its slot.

    Every device uses torch's own attention: the NPU's fused operator is made for training, and its
    operators for inference support neither fp32 nor a cache of this form.
    """

    cache: KvCache = None  # type: ignore[assignment]
    position: Tensor = None  # type: ignore[assignment]  # [n] position of the new token, < capacity

    def __post_init__(self) -> None:
        where, shape = self.position.device, self.cache.shape
        columns = torch.arange(self.cache.capacity, device=where)
        visible = columns <= self.position[:, None]
        if not device.fuses_layers():
            # Made once here; torch would convert a mask of bool in every layer.
            hidden = torch.zeros(visible.shape, dtype=shape.dtype, device=where)
            visible = hidden.masked_fill_(~visible, float("-inf"))
        self._mask = visible[:, None, None, :]  # [n, 1, 1, capacity]
        slot = torch.arange(len(self.position), device=where)
        group = torch.arange(shape.groups, device=where)
        self._index = slot[:, None], group, self.position[:, None]

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        fused: PackedKernel | None = None,
    ) -> Tensor:
        """Write each row's new key and value to the cache, and attend to all tokens of its slot.

        query:      [n, heads, d] or [n, groups, heads of a group, d], the shape of the result
        key, value: [n, groups, d]
        """
        rows, groups = key.size(0), key.size(1)
        self.cache.write(layer, self._index, key, value)
        keys, values = self.cache.keys[layer - 1], self.cache.values[layer - 1]
        if rows < self.cache.slots:
            keys, values = keys[:rows], values[:rows]
        # The queries of a group stand on the sequence axis, so that no key is copied for each query
        # and scores stay fp32 inside the kernel.
        queries = query if query.dim() == 4 else query.unflatten(1, (groups, -1))
        # A row of the mask for each query: before CANN 9.1 an NPU's attention does not repeat one.
        mask = self._mask.expand(-1, -1, queries.size(2), -1)
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        return out if query.dim() == 4 else out.flatten(1, 2)
