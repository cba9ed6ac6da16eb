"""Mixture of experts: Megatron's settings for the routing of Qwen3-MoE and Mixtral, and its loss.

Both families choose the `moe_router_topk` largest of the softmax over all experts. Renormalised
(Mixtral; Qwen3-MoE with `norm_topk_prob`) that is a softmax over the chosen logits alone, which
Megatron computes without `moe_router_pre_softmax`; with it the chosen probabilities stay as they
are. Logits and probabilities are fp32 whatever the dtype of the model. No token is dropped: experts
have no capacity limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from mindspeed_rlxf.config.schema import ArchitectureConfig


def moe_settings(a: ArchitectureConfig, tp: int, ep: int) -> dict[str, Any]:
    """Return fields of Megatron's TransformerConfig for experts; none for a dense model."""
    if a.num_experts is None:
        return {}
    return {
        "num_moe_experts": a.num_experts,
        "moe_ffn_hidden_size": a.mlp_hidden_size,
        "moe_router_topk": a.moe_router_topk,
        "moe_router_pre_softmax": a.moe_router_pre_softmax,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": a.moe_router_load_balancing_type.value,
        "moe_aux_loss_coeff": a.moe_aux_loss_coeff,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": tp,
    }


class Router(TopKRouter):
    """Megatron's router with another weight of the load-balancing loss.

    Megatron multiplies it by the tokens of the micro-batch, because gradients are divided by the
    tokens of the mini-batch later on. Ours are divided by the sum of `LossOutput.weight` (response
    tokens, responses, pairs or micro-batches), so that is what the loss of each micro-batch is
    multiplied by: its gradient is the mean over the mini-batch's micro-batches, weighted as their
    main losses are.
    """

    def attach_and_log_load_balancing_loss(
        self, activation: Tensor, aux_loss_coeff: float, aux_loss: Tensor, *_: Any, **__: Any
    ) -> Tensor:
        return _WithBalanceLoss.apply(activation, aux_loss)

    def apply_load_balancing_loss(
        self, activation: Tensor, load_balancing_loss_func: Callable[..., Tensor]
    ) -> Tensor:
        """Add the balance loss to the backward pass, when megatron-core 0.12 or 0.13 calls this."""
        coefficient, group = self.config.moe_aux_loss_coeff, None
        if coefficient == 0:
            return activation
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            group = parallel_state.get_tensor_model_parallel_group()
        aux_loss = load_balancing_loss_func(
            moe_aux_loss_coeff=coefficient, sequence_partition_group=group
        )
        return _WithBalanceLoss.apply(activation, aux_loss)


class _WithBalanceLoss(torch.autograd.Function):
    """Gives on `output`, and in backward adds `weight` times the gradient of `loss`."""

    weight = 0.0

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.full_like(ctx.like, _WithBalanceLoss.weight)


def weigh_balance_loss(weight: float) -> None:
    """Set the weight of the balance loss for the next backward pass.

    Only the last stage knows it, so the loss needs a pipeline of one stage, where the backward pass
    of a micro-batch comes before the forward pass of the next.
    """
    _WithBalanceLoss.weight = float(weight)


def use_own_router(mlp: ModuleSpec) -> None:
    """Use `Router` in the layers that are built from this specification."""
    if hasattr(mlp.submodules, "router"):
        mlp.submodules.router = Router
    else:  # Megatron 0.12 builds the router by its name in this module
        moe_layer.TopKRouter = Router


GROUPED_BYTES = 16  # rows of the weights of a grouped product begin at multiples of it
_GROUPED = getattr(F, "grouped_mm", None)  # of newer versions of torch


class GroupedExperts:
    """The experts of a layer in two grouped products, without a gradient and a wait for the device.

    Megatron's module computes one expert after the other and reads on the host how many tokens each
    gets. Every tensor-parallel rank has all tokens and its part of each expert.
    """

    def __init__(self, router: Any, widens: Tensor, narrows: Tensor, is_reversed: bool) -> None:
        """widens: [experts, 2 * width, hidden]; narrows: [experts, hidden, width]

        is_reversed: the last expert stands first in both
        """
        self.router, self.is_reversed = router, is_reversed
        self.widens, self.narrows = widens.transpose(1, 2), narrows.transpose(1, 2)

    @classmethod
    def of(cls, layer: Any) -> GroupedExperts | None:
        """Take apart Megatron's layer of experts; None where torch or the weights do not allow it.

        The weights must lie at equal distances, as in the buffers of the distributed optimizer and
        after `stack_experts`.
        """
        experts = layer.experts.local_experts
        first, last = (experts[i].linear_fc1.weight.storage_offset() for i in (0, 1))
        widens = stacked([expert.linear_fc1.weight for expert in experts])
        narrows = stacked([expert.linear_fc2.weight for expert in experts])
        if _GROUPED is None or widens is None or narrows is None:
            return None
        strides = (*widens.stride()[:2], *narrows.stride()[:2])
        if any(stride * widens.itemsize % GROUPED_BYTES for stride in strides):
            return None
        return cls(layer.router, widens, narrows, last < first)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute [tokens, hidden] of [tokens, hidden], this rank's part of the sum."""
        assert _GROUPED is not None, "checked in `of`"
        probabilities, _ = self.router(hidden[:, None])  # [tokens, experts], 0 where not chosen
        if self.is_reversed:
            probabilities = probabilities.flip(-1)
        weights, chosen = probabilities.topk(self.router.topk, dim=-1)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        number = torch.arange(probabilities.size(1), device=hidden.device)
        ends = torch.searchsorted(flat[order], number, right=True).to(torch.int32)
        given = hidden[order // self.router.topk]
        gate, up = _GROUPED(given, self.widens, offs=ends).chunk(2, dim=-1)
        inner = (F.silu(gate) * up * weights.flatten()[order, None]).to(hidden.dtype)
        out = torch.empty_like(given)
        out[order] = _GROUPED(inner, self.narrows, offs=ends)
        return out.unflatten(0, (-1, self.router.topk)).sum(1)


def stacked(weights: Sequence[Tensor]) -> Tensor | None:
    """View weights at equal distances in one memory as [weights, ...], in their order there.

    None for others.
    """
    ordered = sorted((weight.data for weight in weights), key=Tensor.storage_offset)
    places = [weight.storage_offset() for weight in ordered]
    steps = {after - before for before, after in pairwise(places)}
    memories = {weight.untyped_storage().data_ptr() for weight in ordered}
    in_order = [weight.storage_offset() for weight in weights] in (places, places[::-1])
    if len(steps) != 1 or len(memories) != 1 or steps == {0} or not in_order:
        return None
    first = ordered[0]
    return first.as_strided((len(ordered), *first.shape), (*steps, *first.stride()))


def stack_experts(model: torch.nn.Module) -> None:
    """Move the experts of each layer into one memory for all; their numbers are lost."""
    for module in model.modules():
        experts = getattr(module, "local_experts", None)
        if experts is None:
            continue
        for name in ("linear_fc1", "linear_fc2"):
            weights = [getattr(expert, name).weight for expert in experts]
            together = weights[0].data.new_zeros((len(weights), *weights[0].shape))
            for weight, part in zip(weights, together, strict=True):
                weight.data = part
