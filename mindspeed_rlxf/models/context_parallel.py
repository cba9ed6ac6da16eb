"""Context parallelism: the ranks of a group share the tokens of a micro-batch (Ulysses).

Outside attention a rank has consecutive tokens with all heads; inside it has all tokens with some
heads (arXiv:2309.14509). Losses see complete rows: what is computed from a rank's hidden states is
gathered on all ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rlxf.device.copies import upload


def exchange_for_heads(
    query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup, tokens: int, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value of all tokens with this rank's heads.

    If there are fewer key-value heads than ranks, neighbouring ranks get the same one, and its
    gradients are summed.

    Args:
        query: This rank's tokens with all heads.
        key: The same with all key-value heads.
        value: The same.
        group: The ranks that share the tokens.
        tokens: Axis of the tokens.
        heads: Axis of the heads.
    """
    copies = group.size() // key.size(heads)
    if copies > 1:
        key = key.repeat_interleave(copies, dim=heads)
        value = value.repeat_interleave(copies, dim=heads)
    return (
        _AllToAll.apply(query, group, heads, tokens),
        _AllToAll.apply(key, group, heads, tokens),
        _AllToAll.apply(value, group, heads, tokens),
    )


def exchange_for_tokens(
    attended: Tensor, group: dist.ProcessGroup, tokens: int, heads: int
) -> Tensor:
    """Return this rank's tokens with all heads: the inverse of `exchange_for_heads`."""
    exchanged: Tensor = _AllToAll.apply(attended, group, tokens, heads)
    return exchanged


class _AllToAll(torch.autograd.Function):
    """Cuts an axis, one part per rank, and joins the received parts along another axis."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup, cut: int, join: int) -> Tensor:
        ctx.group = group
        ctx.cut = cut
        ctx.join = join
        sent = torch.stack(tensor.chunk(group.size(), dim=cut))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        del sent  # makes room for the result
        return torch.cat(received.unbind(0), dim=join)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _AllToAll.apply(grad, ctx.group, ctx.join, ctx.cut), None, None, None


def compute_at(
    hidden: Tensor,
    places: Tensor,
    group: dist.ProcessGroup | None,
    compute: Callable[[Tensor, Tensor | None], Tensor],
) -> Tensor:
    """Compute from the hidden states at flat places; all ranks of the group get all results.

    Args:
        hidden: [tokens, hidden], this rank's tokens, equally many on every rank.
        places: [places] int64 on the host, flat indices in the tokens of all ranks.
        group: The ranks that share the tokens; None = this rank has all.
        compute: Called with this rank's states [own places, hidden] and their numbers among the
            places, on the host; None = all of them, in order. Returns [own places, ...].

    Returns:
        [places, ...]. Each rank's gradient is that of its own places: all ranks compute the same
        loss, so the ranks' gradients must be summed and not averaged.
    """
    if group is None:
        return compute(hidden.index_select(0, upload(places, hidden.device)), None)
    owners = places // len(hidden)
    own_numbers = (owners == group.rank()).nonzero()[:, 0]
    own_places = places[own_numbers] - group.rank() * len(hidden)
    computed = compute(hidden.index_select(0, upload(own_places, hidden.device)), own_numbers)
    sizes = torch.bincount(owners, minlength=group.size()).tolist()
    gathered: Tensor = _Gather.apply(computed, group, sizes)
    # Gathered are the results of the first rank, then of the second, and so on.
    order = owners.argsort(stable=True).argsort()
    return gathered.index_select(0, upload(order, hidden.device))


class _Gather(torch.autograd.Function):
    """Concatenates all ranks' rows; a rank's gradient is that of its own rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup, sizes: list[int]) -> Tensor:
        ctx.start = sum(sizes[: group.rank()])
        ctx.size = len(rows)
        padded = rows.new_zeros(max(*sizes, 1), *rows.shape[1:])
        padded[: len(rows)] = rows
        received = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(received, padded, group=group)
        rows_of_ranks = []
        for padded_rows, size in zip(received, sizes, strict=True):
            rows_of_ranks.append(padded_rows[:size])
        return torch.cat(rows_of_ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[ctx.start : ctx.start + ctx.size], None, None
