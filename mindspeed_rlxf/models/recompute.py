"""Recompute gated activations in the backward pass; Megatron's own settings cover norms and MLPs.

Of five tensors of an MLP's width the output of its first linear remains, which is two.
"""

from types import MethodType
from typing import Any

from megatron.core.fusions import fused_bias_swiglu
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from torch import Tensor

from mindspeed_rlxf.models.grouped_experts import GroupedMLP


def recompute_activations(model: Any) -> None:
    """Let MLPs and grouped experts of a model recompute their gated activations.

    Experts that are computed one by one, as on an NPU, keep theirs.
    """
    for layer in model.decoder.layers:
        experts = getattr(layer.mlp, "experts", None)
        if experts is None:
            layer.mlp.forward = MethodType(_forward, layer.mlp)
        elif isinstance(experts, GroupedMLP):
            experts.recomputes_activation = True


def _forward(mlp: Any, hidden: Tensor, padding_mask: None = None) -> tuple[Tensor, None]:
    """Compute like the forward of Megatron's MLP, which has no bias here.

    Megatron's layer passes a `padding_mask`, of which only a router makes use.
    """

    def activate(widened: Tensor) -> Tensor:
        if mlp.config.bias_activation_fusion:
            return fused_bias_swiglu.bias_swiglu_impl(widened, None)  # type: ignore[no-any-return]
        gate, up = widened.chunk(2, dim=-1)
        return mlp.activation_func(gate) * up  # type: ignore[no-any-return]

    widened, _ = mlp.linear_fc1(hidden)
    activation = CheckpointWithoutOutput()
    inner = activation.checkpoint(activate, widened)
    output, bias = mlp.linear_fc2(inner)
    activation.discard_output_and_register_recompute(output)
    return output, bias
