"""A layer's experts in grouped GEMMs: one call for all experts on a rank.

Megatron's module computes experts one by one: hundreds of operators per layer with many experts.
The parameters stay Megatron's, one MLP per expert. A grouped GEMM views all experts' weights as one
tensor, so they must be equally spaced in one storage: `stack_experts` puts them there, as do the
distributed optimizer's buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

GROUPED_BYTES = 16  # a grouped GEMM needs rows of weights that begin at multiples of it
_GROUPED: Any = getattr(F, "grouped_mm", None)  # None = this version of torch is too old


@dataclass(frozen=True)
class ExpertWeights:
    """Views over all experts' weights."""

    widens: Tensor  # [experts, 2 * width, hidden], gate and up projections
    narrows: Tensor  # [experts, hidden, width], down projections
    is_reversed: bool  # the last expert comes first, as in the distributed optimizer's buffers

    @classmethod
    def of(cls, experts: Sequence[Any]) -> ExpertWeights | None:
        """View the weights of Megatron's MLPs, one per expert, in memory order.

        None if torch has no grouped GEMM, or cannot use the weights as they lie in memory.
        """
        widens = view_as_stack([expert.linear_fc1.weight for expert in experts])
        narrows = view_as_stack([expert.linear_fc2.weight for expert in experts])
        if _GROUPED is None or widens is None or narrows is None:
            return None
        strides = (*widens.stride()[:2], *narrows.stride()[:2])
        if any(stride * widens.itemsize % GROUPED_BYTES for stride in strides):
            return None
        first_offset = experts[0].linear_fc1.weight.storage_offset()
        last_offset = experts[-1].linear_fc1.weight.storage_offset()
        return cls(widens, narrows, is_reversed=last_offset < first_offset)


def routed_experts(hidden: Tensor, router: Any, weights: ExpertWeights) -> Tensor:
    """Route and compute tokens in a decode step, [tokens, hidden] -> [tokens, hidden].

    No gradient and no device sync. This rank has all tokens and a tensor-parallel shard per expert,
    so the caller must sum the result over the ranks. `router` is Megatron's.
    """
    probabilities, _ = router(hidden[:, None])  # [tokens, experts], 0 where not chosen
    if weights.is_reversed:
        probabilities = probabilities.flip(-1)
    shares, chosen = probabilities.topk(router.topk, dim=-1)
    order, ends = sort_by_expert(chosen.flatten(), probabilities.size(1))
    rows = hidden[order // router.topk]
    out = torch.empty_like(rows)
    out[order] = gated_products(rows, shares.flatten()[order], ends, weights)
    return out.unflatten(0, (-1, router.topk)).sum(1)


def sort_by_expert(numbers: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Sort (token, expert) pairs by expert.

    Args:
        numbers: [pairs] int64 experts; `count` = on another rank, sorted to the end.
        count: number of experts.

    Returns:
        The stable order [pairs] int64, and where each expert's pairs end in it [count] int32.
    """
    order = numbers.argsort(stable=True)
    experts = torch.arange(count, device=numbers.device)
    return order, torch.searchsorted(numbers[order], experts, right=True).to(torch.int32)


def gated_products(rows: Tensor, shares: Tensor, ends: Tensor, weights: ExpertWeights) -> Tensor:
    """Return share * MLP(row) for each row, by its expert, [rows, hidden]; no gradient.

    Args:
        rows: [rows, hidden], sorted by expert in the order of `weights`.
        shares: [rows] fp32.
        ends: [experts] int32, end of each expert's rows; results for rows behind are undefined.
        weights: the experts.
    """
    dtype = rows.dtype
    gate, up = _GROUPED(rows, weights.widens.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    del rows  # in a prefill these tensors are large
    inner = (F.silu(gate) * up * shares[:, None]).to(dtype)
    del gate, up
    return _GROUPED(inner, weights.narrows.transpose(1, 2), offs=ends)


class GroupedMLP(SequentialMLP):  # type: ignore[misc]
    """Megatron's experts, in grouped GEMMs if torch and weights allow; same results."""

    recomputes_activation = False  # in backward, from the outputs of the first grouped GEMM

    def forward(
        self, hidden: Tensor, tokens_per_expert: Tensor, probabilities: Tensor
    ) -> tuple[Tensor, None]:
        """Return probability * expert(token) for each token, and None instead of a bias.

        Megatron computes it for one expert, no token, or if `ExpertWeights.of` is None.

        Args:
            hidden: [tokens, hidden], sorted by this rank's experts.
            tokens_per_expert: [experts] int, on host or device.
            probabilities: [tokens] fp32.
        """
        experts = list(self.local_experts)
        weights = ExpertWeights.of(experts) if len(experts) > 1 and len(hidden) else None
        if weights is None:
            return super().forward(hidden, tokens_per_expert, probabilities)
        for expert in experts:  # `overlap_param_gather` may still be gathering their weights
            for linear in (expert.linear_fc1, expert.linear_fc2):
                for hook in list(linear._forward_pre_hooks.values()):
                    hook(linear, ())
        counts = tokens_per_expert.to(hidden.device)
        recomputes = self.recomputes_activation
        if not weights.is_reversed:
            out = _weighted_mlp(hidden, counts, probabilities, weights, experts, recomputes)
            return out, None
        # The tokens of the last expert come first, as its weights do.
        reversed_counts = counts.flip(0)
        starts = (counts.cumsum(0) - counts).flip(0)
        shift = starts - (reversed_counts.cumsum(0) - reversed_counts)
        index = torch.arange(len(hidden), device=counts.device)
        order = index + torch.repeat_interleave(shift, reversed_counts, output_size=len(hidden))
        back = order.argsort()
        hidden = _Permute.apply(hidden, order, back)
        probabilities = _Permute.apply(probabilities, order, back)
        out = _weighted_mlp(
            hidden, reversed_counts, probabilities, weights, experts[::-1], recomputes
        )
        return _Permute.apply(out, back, order), None


def _weighted_mlp(
    hidden: Tensor,
    counts: Tensor,
    probabilities: Tensor,
    weights: ExpertWeights,
    experts: list[Any],
    recomputes: bool,
) -> Tensor:
    def activate(widened: Tensor, probabilities: Tensor) -> Tensor:
        gate, up = widened.chunk(2, dim=-1)
        return (F.silu(gate) * up * probabilities[:, None]).to(widened.dtype)

    ends = counts.cumsum(0).to(torch.int32)
    fc1 = [expert.linear_fc1.weight for expert in experts]
    fc2 = [expert.linear_fc2.weight for expert in experts]
    widened = _Product.apply(hidden, weights.widens, ends, *fc1)
    if not recomputes:
        inner = activate(widened, probabilities)
        return _Product.apply(inner, weights.narrows, ends, *fc2)
    activation = CheckpointWithoutOutput()
    inner = activation.checkpoint(activate, widened, probabilities)
    out = _Product.apply(inner, weights.narrows, ends, *fc2)
    activation.discard_output_and_register_recompute(out)
    return out


class _Product(torch.autograd.Function):
    """rows @ weight.T per expert, with gradients for rows and experts' parameters."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, stack: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        """Return row @ weight.T by each row's expert, [tokens, out].

        Args:
            ctx: autograd context.
            rows: [tokens, in], sorted by expert.
            stack: [experts, out, in], a view over `weights`.
            ends: [experts] int32, end of each expert's rows.
            weights: experts' parameters [out, in].
        """
        ctx.save_for_backward(rows, ends)
        ctx.stack = stack
        return _GROUPED(rows, stack.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, ends = ctx.saved_tensors
        grad = grads[0].contiguous()
        to_rows = _GROUPED(grad, ctx.stack, offs=ends)
        if not any(ctx.needs_input_grad[3:]):  # frozen experts
            return to_rows, None, None, *[None] * len(ctx.needs_input_grad[3:])
        to_weights = _GROUPED(grad.t(), rows, offs=ends)
        # Some GPUs leave the gradient of an expert without tokens as it is (pytorch#172439).
        empty = torch.diff(ends, prepend=ends.new_zeros(1)) == 0
        to_weights.masked_fill_(empty[:, None, None], 0)
        return to_rows, None, None, *to_weights.unbind(0)


class _Permute(torch.autograd.Function):
    """rows[order]; backward gathers the gradient by `back`, the inverse order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (back,) = ctx.saved_tensors
        return grads[0][back], None, None


def view_as_stack(weights: Sequence[Tensor]) -> Tensor | None:
    """View weights as one tensor [weights, ...], in memory order.

    None unless equally spaced in one storage, in the given order or in reverse.
    """
    ordered = sorted((weight.data for weight in weights), key=Tensor.storage_offset)
    if len(ordered) == 1:
        return ordered[0][None]
    offsets = [weight.storage_offset() for weight in ordered]
    steps = {after - before for before, after in pairwise(offsets)}
    storages = {weight.untyped_storage().data_ptr() for weight in ordered}
    in_order = [weight.storage_offset() for weight in weights] in (offsets, offsets[::-1])
    if len(steps) != 1 or len(storages) != 1 or steps == {0} or not in_order:
        return None
    start = ordered[0]
    return start.as_strided((len(ordered), *start.shape), (*steps, *start.stride()))


def stack_experts(model: torch.nn.Module) -> None:
    """Move each layer's experts into one storage per weight; all become 0."""
    for module in model.modules():
        experts = getattr(module, "local_experts", None)
        if experts is None:
            continue
        for name in ("linear_fc1", "linear_fc2"):
            weights = [getattr(expert, name).weight for expert in experts]
            stack = weights[0].data.new_zeros((len(weights), *weights[0].shape))
            for weight, view in zip(weights, stack, strict=True):
                weight.data = view
