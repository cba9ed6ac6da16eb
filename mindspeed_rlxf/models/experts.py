"""Mixture of experts: Megatron's settings for the routing of Qwen3-MoE and Mixtral, and its loss.

Both families choose the `moe_router_topk` experts of largest softmax probability. Megatron with
`moe_router_pre_softmax` leaves the chosen probabilities as they are. Without it they add up to 1
(Mixtral; Qwen3-MoE with `norm_topk_prob`), as a softmax over the chosen logits alone. Logits and
probabilities are fp32 whatever the dtype of the model. No token is dropped: experts have no
capacity limit.
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
    """Return the fields of Megatron's TransformerConfig for experts; {} for a dense model.

    tp, ep: tensor- and expert-parallel size; each expert is split over all `tp` ranks
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
    """Megatron's router with another weight of the load-balancing loss.

    Megatron multiplies that loss by the micro-batch's tokens, because it divides gradients by the
    mini-batch's tokens later. Here gradients are divided by the sum of `LossOutput.weight`
    (response tokens, responses, pairs or micro-batches). So the loss of a micro-batch is multiplied
    by its `LossOutput.weight` (see `set_balance_loss_weight`), and averages over the mini-batch
    with the same weights as the main loss.
    """

    def attach_and_log_load_balancing_loss(
        self, activation: Tensor, aux_loss_coeff: float, aux_loss: Tensor, *_: Any, **__: Any
    ) -> Tensor:
        """Return `activation`; its backward pass adds the gradient of the balance loss.

        Called by megatron-core 0.14 and newer.
        aux_loss: already multiplied by its coefficient
        """
        return _WithBalanceLoss.apply(activation, aux_loss)

    def apply_load_balancing_loss(
        self, activation: Tensor, load_balancing_loss_func: Callable[..., Tensor]
    ) -> Tensor:
        """Compute the balance loss; return `activation`, whose backward pass adds its gradient.

        With a coefficient of 0 only returns `activation`. Only megatron-core 0.12 and 0.13 call
        this.
        """
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
    """Returns `output` unchanged; the backward pass adds `weight` times the gradient of `loss`."""

    weight = 0.0

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.full_like(ctx.like, _WithBalanceLoss.weight)


def set_balance_loss_weight(weight: float) -> None:
    """Set, for this process, the weight of the balance loss in later backward passes; 0 at first.

    Call it with the `LossOutput.weight` of each micro-batch. Only the last pipeline stage knows
    that weight, so the loss needs a pipeline of one stage, where the backward pass of a micro-batch
    comes before the forward pass of the next.
    """
    _WithBalanceLoss.weight = float(weight)


def use_own_router(mlp: ModuleSpec) -> None:
    """Put `Router` into the specification of an MoE layer.

    With megatron-core 0.12 it replaces the router of all MoE layers built later in this process.
    """
    if hasattr(mlp.submodules, "router"):
        mlp.submodules.router = Router
    else:  # Megatron 0.12 builds the router by its name in this module
        moe_layer.TopKRouter = Router
