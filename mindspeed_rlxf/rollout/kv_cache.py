"""Growing key-value cache, and the attention in prefill and decode.

Axes: rows = cache rows, groups = key-value groups used by this tensor-parallel rank; ranks that
share a group each have its keys and values. The batch is always rows 0 .. n - 1, so that a decode
step computes only these.

A layer's keys are one tensor [rows, groups, capacity, head_dim]. The capacity is the longest row's
length, rounded up to pages with PAGE tokens: it grows a page at a time and shrinks when long rows
have ended. So a row takes memory for the longest row now, not for the most tokens it may get. The
cache is copied once in PAGE steps, one layer after the other.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_rlxf import device
from mindspeed_rlxf.config.generation_memory import PAGE, round_to_pages
from mindspeed_rlxf.device import kernels
from mindspeed_rlxf.models.attention import Attend, PackedKernel, PackedSequences


@dataclass(frozen=True)
class CacheShape:
    """Size per cache row on this rank."""

    num_layers: int
    groups: int
    head_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes for one token's keys and values, in all layers."""
        return 2 * self.num_layers * self.groups * self.head_dim * self.dtype.itemsize


class KvCache:
    """Keys and values for all layers: [layer][rows, groups, capacity, head_dim].

    Attributes:
        num_resizes: How often `fit` has replaced the tensors.
    """

    def __init__(self, shape: CacheShape, max_length: int, device: torch.device) -> None:
        """Make a cache without rows, which may have up to `max_length` tokens."""
        self.shape = shape
        self.max_length = max_length
        self.num_rows = 0
        self.capacity = 0
        self.num_resizes = 0
        empty = (0, shape.groups, 0, shape.head_dim)
        layers = range(shape.num_layers)
        self.keys = [torch.zeros(empty, dtype=shape.dtype, device=device) for _ in layers]
        self.values = [torch.zeros_like(keys) for keys in self.keys]

    def fit(self, num_rows: int, length: int) -> None:
        """Reallocate the cache for `num_rows` rows with `length` tokens, rounded up to pages.

        The first `num_rows` rows keep their keys and values, as far as the new capacity goes. A
        cache that is large enough stays unchanged, unless it is over a page longer than needed, or
        has twice the rows or more.
        """
        capacity = min(round_to_pages(length), self.max_length)
        if num_rows <= self.num_rows and capacity <= self.capacity <= capacity + PAGE:
            if 2 * num_rows > self.num_rows:
                return
            capacity = self.capacity
        num_kept_rows = min(num_rows, self.num_rows)
        kept_capacity = min(capacity, self.capacity)
        size = (num_rows, self.shape.groups, capacity, self.shape.head_dim)
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                # Zeros, because a mask does not hide NaN at places that a row has not reached.
                tensors[layer] = old.new_zeros(size)
                kept = (slice(num_kept_rows), slice(None), slice(kept_capacity))
                tensors[layer][kept] = old[kept]
                del old
        self.num_rows = num_rows
        self.capacity = capacity
        self.num_resizes += 1

    def write(self, layer: int, index: tuple[Tensor, ...], key: Tensor, value: Tensor) -> None:
        """Store each token's key and value, [tokens, groups, head_dim] each.

        `layer` counts from 1; `index` has (row, group, position), int64 tensors that broadcast to
        [tokens, groups].
        """
        self.keys[layer - 1][index] = key
        self.values[layer - 1][index] = value

    def copy(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first `length` positions from rows `source` to rows `target`."""
        for tensor in (*self.keys, *self.values):
            tensor[target, :, :length] = tensor[source, :, :length]

    def read_row(self, row: int, length: int) -> Tensor:
        """Return a copy of a row's first `length` positions, [2 layers, groups, length, d]."""
        return torch.stack([tensor[row, :, :length] for tensor in (*self.keys, *self.values)])

    def write_row(self, row: int, first: Tensor) -> None:
        """Write a row's first positions, as `read_row` has returned them."""
        for tensor, copied in zip((*self.keys, *self.values), first, strict=True):
            tensor[row, :, : first.size(2)] = copied


@dataclass(frozen=True, eq=False)
class KeptRow:
    """Tokens of a row that has left the batch, and their keys and values (`KvCache.read_row`)."""

    token_ids: np.ndarray
    keys_and_values: Tensor


@dataclass
class Prefill(PackedSequences):
    """Attention over whole packed rows; their keys and values go to the cache."""

    cache: KvCache = None  # type: ignore[assignment]
    cache_row: Tensor = None  # type: ignore[assignment]  # [tokens] int64, each token's row
    position: Tensor = None  # type: ignore[assignment]  # [tokens] int64, in the row

    def __post_init__(self) -> None:
        super().__post_init__()
        group = torch.arange(self.cache.shape.groups, device=self.cache_row.device)
        self._places = self.cache_row[:, None], group, self.position[:, None]

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
class Continuation(Attend):
    """Attention from the new tokens of rows, packed, to all tokens in them.

    The cache has the keys and values of each row's earlier tokens. Every device uses torch's own
    attention, once per row.
    """

    cache: KvCache = None  # type: ignore[assignment]
    cache_rows: tuple[int, ...] = ()
    num_earlier: tuple[int, ...] = ()  # of each row, tokens in the cache
    lengths: tuple[int, ...] = ()  # of each row, new tokens

    def __post_init__(self) -> None:
        where = self.cache.keys[0].device
        self._masks = []
        positions = []
        for start, length in zip(self.num_earlier, self.lengths, strict=True):
            position = torch.arange(start, start + length)
            positions.append(position)
            visible = torch.arange(start + length) <= position[:, None]
            self._masks.append(visible.to(where))
        self.position = torch.cat(positions).to(where)  # [tokens], in the row
        row = torch.tensor(self.cache_rows).repeat_interleave(torch.tensor(self.lengths)).to(where)
        group = torch.arange(self.cache.shape.groups, device=where)
        self._index = row[:, None], group, self.position[:, None]

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        fused: PackedKernel | None = None,
    ) -> Tensor:
        """Write keys and values to the cache, and attend to all tokens in each row."""
        self.cache.write(layer, self._index, key, value)
        keys, values = self.cache.keys[layer - 1], self.cache.values[layer - 1]
        gqa = query.size(1) != key.size(1)
        outs = []
        for row, row_query, mask in zip(
            self.cache_rows, query.split(self.lengths), self._masks, strict=True
        ):
            num_tokens = mask.size(1)
            out = F.scaled_dot_product_attention(
                row_query.transpose(0, 1).unsqueeze(0),
                keys[row : row + 1, :, :num_tokens],
                values[row : row + 1, :, :num_tokens],
                attn_mask=mask,
                enable_gqa=gqa,
            )
            outs.append(out.squeeze(0).transpose(0, 1))
        return torch.cat(outs)


@dataclass
class DecodeStep(Attend):
    """Attention from one new token for each row 0 .. n - 1 to all tokens in its row.

    It is torch's own attention; in bf16 on an NPU its operator for inference if trying shows that
    it works with these heads. The NPU's operator for training takes no cache.
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
        self._hidden: Tensor | None = None  # the mask of the NPU's operator
        if device.fuses_layers() and shape.dtype is torch.bfloat16:
            self._hidden = ~self._mask
        row = torch.arange(len(self.position), device=where)
        group = torch.arange(shape.groups, device=where)
        self._index = row[:, None], group, self.position[:, None]

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        fused: PackedKernel | None = None,
    ) -> Tensor:
        """Write each row's new key and value to the cache, and attend to all tokens in its row.

        Keys and values are [n, groups, d]; queries and the result are [n, heads, d] or [n, groups,
        heads per group, d].
        """
        rows, groups = key.size(0), key.size(1)
        self.cache.write(layer, self._index, key, value)
        keys, values = self.cache.keys[layer - 1], self.cache.values[layer - 1]
        if rows < self.cache.num_rows:
            keys, values = keys[:rows], values[:rows]
        if self._hidden is not None:
            heads = query.flatten(1, -2)  # [n, heads, d]
            operator = kernels.find(kernels.Operator.DECODE, heads.size(1), groups, heads.size(2))
            if operator is not None:
                fused_out: Tensor = operator(heads[:, :, None], keys, values, self._hidden)
                return fused_out.view(query.shape)
        # The queries of a group stand on the sequence axis, so that no key is copied for each query
        # and scores stay fp32 inside the kernel.
        queries = query if query.dim() == 4 else query.unflatten(1, (groups, -1))
        # A row of the mask for each query: before CANN 9.1 an NPU's attention does not repeat one.
        mask = self._mask.expand(-1, -1, queries.size(2), -1)
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        return out if query.dim() == 4 else out.flatten(1, 2)
