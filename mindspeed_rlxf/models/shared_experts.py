"""A layer's experts, shared by an expert-parallel group, without a gradient.

Each rank has its own tokens and experts. A pass gathers all ranks' tokens on every rank, each rank
sums its experts' results per token, and these sums are added up on the token's own rank:

    own tokens [tokens, h] -- all_gather --> [ep * size, h] -- own experts -->
    partial sums [ep * size, h] fp32 -- reduce_scatter --> own tokens [tokens, h]

The host knows the sizes before the pass (`Exchange.sizes`), so no rank waits for its device. A rank
without tokens participates with none. Only the token's own rank runs the router: on another rank,
rounding could choose other experts.

Axes: h = hidden size, ep = group size, size = largest token count (all ranks pad to it)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from mindspeed_rlxf import device
from mindspeed_rlxf.config.generation_memory import EXCHANGE_TOKENS
from mindspeed_rlxf.models.grouped_experts import ExpertWeights, gated_products, sort_by_expert

# Newer versions of torch have other names for these two.
_ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass
class Exchange:
    """The ranks sharing a module's experts, and their present pass."""

    ep: dist.ProcessGroup  # expert-parallel
    tp: dist.ProcessGroup  # tensor-parallel, whose ranks split each expert
    sizes: Sequence[int] = ()  # each `ep` rank's tokens; set before each pass, equal on all ranks


class SharedExperts(nn.Module):
    """Replaces Megatron's MoE layer in a generating module; has the same parameter names.

    A call is a collective: all ranks in the group call the same layer at the same time.
    """

    def __init__(self, layer: Any, exchange: Exchange) -> None:
        """Take router and experts from Megatron's MoE layer; `bind` must precede any pass."""
        super().__init__()
        self.router = layer.router
        self.experts = layer.experts
        self.exchange = exchange
        self.count = len(layer.experts.local_experts)
        self.weights: ExpertWeights | None = None  # None = Megatron's module computes

    def bind(self) -> None:
        """View the weights in their present place; call it again after moving them.

        Views none if they cannot be viewed, or MindSpeed's module computes experts in its own way.
        """
        fused = device.fuses_layers()
        self.weights = None if fused else ExpertWeights.of(self.experts.local_experts)

    def release(self) -> None:
        """Drop the views: they would keep freed weights in memory."""
        self.weights = None

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Compute the layer for this rank's tokens; Megatron's second result, a bias, is None.

        A collective over the expert-parallel ranks, and each replica's tensor-parallel ranks.
        `hidden` and the result are [tokens, 1, h], with this rank's count in `exchange.sizes`. It
        may be 0, but not on all ranks.
        """
        exchange = self.exchange
        topk = self.router.topk
        tokens = hidden.flatten(0, 1)
        routes = hidden.new_zeros(0, 2 * topk, dtype=torch.float32)  # shares, then experts
        if hidden.numel():
            probabilities, _ = self.router(hidden)  # [tokens, experts], 0 where not chosen
            shares, numbers = probabilities.topk(topk, dim=-1)
            routes = torch.cat((shares.float(), numbers.float()), dim=-1)
        chunk_size = max(1, EXCHANGE_TOKENS // exchange.ep.size())  # of a rank; limits the memory
        outs = []
        for start in range(0, max(exchange.sizes), chunk_size):
            chunk = slice(start, start + chunk_size)
            sizes = [min(max(size - start, 0), chunk_size) for size in exchange.sizes]
            outs.append(self._exchange_chunk(tokens[chunk], routes[chunk], sizes))
        out = torch.cat(outs) if len(outs) > 1 else outs[0]
        return out.view_as(hidden), None

    def _exchange_chunk(self, hidden: Tensor, routes: Tensor, sizes: Sequence[int]) -> Tensor:
        """Compute the layer for one token chunk per rank; a collective.

        Sums in fp32 and rounds once: first over the expert-parallel ranks, which leaves only own
        tokens, then over the tensor-parallel ranks.

        Args:
            hidden: own tokens [tokens, h].
            routes: for own tokens [tokens, 2 * topk] fp32: shares, then experts.
            sizes: each rank's tokens in this chunk.

        Returns:
            [tokens, h] for own tokens.
        """
        group = self.exchange.ep
        count = self.count
        all_hidden = _gather_rows(hidden, sizes, group)
        routes = _gather_rows(routes, sizes, group, padding=-1.0)  # no rank has an expert -1
        shares, numbers = routes.chunk(2, dim=-1)
        local = numbers.long() - group.rank() * count
        local = local.masked_fill((local < 0) | (local >= count), count)
        if self.weights is None:
            sums = self._with_megatron(all_hidden, local, shares.flatten())
        else:
            sums = self._in_grouped_gemms(self.weights, all_hidden, local, shares.flatten())
        out = _sum_rows(sums, sizes, group)[: len(hidden)]
        if self.exchange.tp.size() > 1 and len(out):  # the ranks of a replica have the same tokens
            dist.all_reduce(out, group=self.exchange.tp)
        return out.to(hidden.dtype)

    def _in_grouped_gemms(
        self, weights: ExpertWeights, hidden: Tensor, numbers: Tensor, shares: Tensor
    ) -> Tensor:
        """Return each token's weighted sum over this rank's experts, [tokens, h] fp32.

        Runs grouped GEMMs over (token, expert) pairs, without a device sync. Pairs for other ranks
        are sorted to the end, left out, and count as 0.

        Args:
            weights: this rank's experts.
            hidden: [tokens, h].
            numbers: [tokens, topk] int64, experts counted from 0 on this rank; `count` = another
                rank's.
            shares: [tokens * topk] fp32, weight for each expert's result.
        """
        topk = numbers.size(1)
        is_elsewhere = numbers.flatten() == self.count
        if weights.is_reversed:
            numbers = torch.where(numbers == self.count, numbers, self.count - 1 - numbers)
        order, ends = sort_by_expert(numbers.flatten(), self.count)
        rows = gated_products(hidden[order // topk], shares[order], ends, weights)
        pairs = torch.empty_like(rows)
        pairs[order] = rows
        del rows  # its memory is for the sum
        pairs.masked_fill_(is_elsewhere[:, None], 0)  # may be anything, nan too
        return pairs.unflatten(0, (-1, topk)).sum(1, dtype=torch.float32)

    def _with_megatron(self, hidden: Tensor, numbers: Tensor, shares: Tensor) -> Tensor:
        """Like `_in_grouped_gemms`, with Megatron's module; the sort syncs with the host.

        Results become fp32 before the sum: an NPU cannot sum in another dtype than its input's.
        """
        topk = numbers.size(1)
        flat = numbers.flatten().cpu()
        counts = flat.bincount(minlength=self.count + 1)[: self.count]
        order = flat.argsort(stable=True)[: int(counts.sum())]
        pairs = hidden.new_zeros(len(flat), hidden.size(1), dtype=torch.float32)
        if len(order):
            order = order.to(hidden.device)
            out, _ = self.experts(hidden[order // topk], counts, shares[order])
            pairs[order] = out.float()
        return pairs.unflatten(0, (-1, topk)).sum(1)


def _gather_rows(
    rows: Tensor, sizes: Sequence[int], group: dist.ProcessGroup, padding: float = 0.0
) -> Tensor:
    size = max(sizes)
    gathered = rows.new_empty(len(sizes) * size, rows.size(1))
    _ALL_GATHER(gathered, F.pad(rows, (0, 0, 0, size - len(rows)), value=padding), group=group)
    if not _is_sparse(sizes):
        return gathered
    rows_of_ranks = []
    for padded_rows, count in zip(gathered.split(size), sizes, strict=True):
        if count:
            rows_of_ranks.append(padded_rows[:count])
    return torch.cat(rows_of_ranks)


def _sum_rows(rows: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Sum rows over the ranks; return this rank's own rows, then padding; a collective."""
    size = max(sizes)
    if _is_sparse(sizes):
        padded = rows.new_zeros(len(sizes), size, rows.size(1))
        for padded_rows, rank_rows in zip(padded, rows.split(list(sizes)), strict=True):
            padded_rows[: len(rank_rows)] = rank_rows
        rows = padded.flatten(0, 1)
    sums = rows.new_empty(size, rows.size(1))
    _REDUCE_SCATTER(sums, rows, group=group)
    return sums


def _is_sparse(sizes: Sequence[int]) -> bool:
    """Whether at least half the padded rows are padding: dropping it then saves time."""
    return 2 * sum(sizes) <= len(sizes) * max(sizes)


def share_experts(module: nn.Module, exchange: Exchange) -> list[SharedExperts]:
    """Replace every layer's MLP, an MoE layer, by SharedExperts; return these."""
    shared = []
    for layer in module.decoder.layers:  # type: ignore[union-attr]
        layer.mlp = SharedExperts(layer.mlp, exchange)  # type: ignore[union-attr]
        shared.append(layer.mlp)
    return shared
