"""Mixture of experts: Megatron's settings for the routing of Qwen3-MoE and Mixtral, and its loss.

Both families choose the `moe_router_topk` largest of the softmax over all experts. Renormalised
(Mixtral; Qwen3-MoE with `norm_topk_prob`) that is a softmax over the chosen logits alone, which
Megatron computes without `moe_router_pre_softmax`; with it the chosen probabilities stay as they
are. Logits and probabilities are fp32 whatever the dtype of the model. No token is dropped: experts
have no capacity limit.
"""

from __future__ import annotations

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
