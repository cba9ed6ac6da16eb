"""Mixture-of-experts routing in Megatron for Qwen3-MoE and Mixtral, and its loss.

Both families choose the `moe_router_topk` experts with the largest softmax probability. With
`moe_router_pre_softmax` Megatron keeps the chosen probabilities. Without it they sum to 1 (Mixtral;
Qwen3-MoE with `norm_topk_prob`), like a softmax over the chosen logits alone. Logits and
probabilities are always fp32. Experts have no capacity limit, so no token is dropped.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from mindspeed_rlxf.config.schema import ArchitectureConfig


def moe_settings(a: ArchitectureConfig, tp: int, ep: int) -> dict[str, Any]:
    """Return TransformerConfig fields for experts; {} for a dense model.

    Each expert is split over all `tp` ranks.
    """
    if a.num_experts is None:
        return {}
    return {
        "num_moe_experts": a.num_experts,
        "moe_ffn_hidden_size": a.mlp_hidden_size,
        "moe_router_topk": a.moe_router_topk,
        "moe_router_pre_softmax": a.moe_router_pre_softmax,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": a.moe_router_load_balancing_type,
        "moe_aux_loss_coeff": a.moe_aux_loss_coeff,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": tp,
    }


class Router(TopKRouter):
    """Megatron's router with another weight for the load-balancing loss.

    Megatron multiplies the loss by the micro-batch's tokens, as it later divides gradients by the
    mini-batch's. We divide gradients by the summed `LossOutput.weight` (response tokens, responses,
    pairs or micro-batches), so we multiply a micro-batch's loss by its weight
    (`set_balance_loss_weight`): it then averages over the mini-batch like the main loss.
    """

    def attach_and_log_load_balancing_loss(
        self, activation: Tensor, aux_loss_coeff: float, aux_loss: Tensor, *_: Any, **__: Any
    ) -> Tensor:
        """Return `activation`; backward adds the balance loss's gradient.

        `aux_loss` includes its coefficient. Called by megatron-core 0.14 and newer.
        """
        return _WithBalanceLoss.apply(activation, aux_loss)

    def apply_load_balancing_loss(
        self, activation: Tensor, load_balancing_loss_func: Callable[..., Tensor]
    ) -> Tensor:
        """Compute the balance loss; return `activation`, whose backward adds its gradient.

        Called by megatron-core 0.12 and 0.13 only.
        """
        coefficient = self.config.moe_aux_loss_coeff
        if coefficient == 0:
            return activation
        group = parallel_state.get_tensor_and_context_parallel_group()  # which shares the tokens
        aux_loss = load_balancing_loss_func(
            moe_aux_loss_coeff=coefficient,
            sequence_partition_group=group if group.size() > 1 else None,
        )
        return _WithBalanceLoss.apply(activation, aux_loss)


class _WithBalanceLoss(torch.autograd.Function):
    """Returns `output` unchanged; backward adds `weight` times the gradient for `loss`."""

    weight = 0.0

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.full_like(ctx.like, _WithBalanceLoss.weight)


def set_balance_loss_weight(weight: float) -> None:
    """Set the balance loss's weight in this process's later backward passes; 0 at first.

    Call it with each micro-batch's `LossOutput.weight`. Only the last pipeline stage knows it, so
    the loss needs a single-stage pipeline: there each backward precedes the next forward.
    """
    _WithBalanceLoss.weight = float(weight)


def use_own_router(mlp: ModuleSpec) -> None:
    """Put `Router` into an MoE layer's specification.

    With megatron-core 0.12 it replaces the router in all MoE layers built later in this process.
    """
    if hasattr(mlp.submodules, "router"):
        mlp.submodules.router = Router
    else:  # Megatron 0.12 builds the router by its name in this module
        moe_layer.TopKRouter = Router
