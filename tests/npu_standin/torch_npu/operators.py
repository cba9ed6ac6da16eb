"""Norm, activation, rotary, softmax, optimizer and expert operators of torch_npu in plain torch.

Written after their documentation; autograd follows from torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

MODES = {0: "half", 1: "interleave"}  # of rotary operators


def npu_rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """x / rms(x) * gamma over the axes of gamma, and 1 / rms in fp32; computed in fp32."""
    assert self.dtype == gamma.dtype, f"input is {self.dtype}, gamma is {gamma.dtype}"
    axes = tuple(range(-gamma.dim(), 0))
    assert self.shape[-gamma.dim() :] == gamma.shape, "gamma has the last axes of the input"
    precise = torch.promote_types(self.dtype, torch.float32)
    wide = self.to(precise)
    reverse_rms = torch.rsqrt(wide.square().mean(axes, keepdim=True) + epsilon)
    return (wide * reverse_rms * gamma.to(precise)).to(self.dtype), reverse_rms


def npu_rms_norm_backward(
    dy: Tensor, self: Tensor, gamma: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of input and gamma, from the 1 / rms of the forward pass."""
    precise = torch.promote_types(self.dtype, torch.float32)
    grad, normed = dy.to(precise) * gamma.to(precise), self.to(precise) * rstd
    axes = tuple(range(-gamma.dim(), 0))
    dx = rstd * (grad - normed * (grad * normed).mean(axes, keepdim=True))
    dgamma = (dy.to(precise) * normed).flatten(0, self.dim() - gamma.dim() - 1).sum(0)
    return dx.to(self.dtype), dgamma.to(torch.float32)


def npu_swiglu(self: Tensor, dim: int = -1) -> Tensor:
    """swish(a) * b of the two halves of one axis."""
    gate, up = self.chunk(2, dim)
    return gate * torch.sigmoid(gate) * up


def npu_rotary_mul(self: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    """x * r1 + rotated(x) * r2; four axes, where r1 and r2 are 1 they are repeated."""
    assert self.dim() == r1.dim() == r2.dim() == 4, "the operator takes four axes"
    assert self.size(-1) % 2 == 0 and self.size(-1) < 896, f"head_dim {self.size(-1)}"
    if rotary_mode == "half":
        first, second = self.chunk(2, -1)
        rotated = torch.cat((-second, first), -1)
    else:
        assert rotary_mode == "interleave", f"rotary_mode={rotary_mode}"
        rotated = torch.stack((-self[..., 1::2], self[..., ::2]), -1).flatten(-2)
    return r1 * self + r2 * rotated


def npu_rotary_position_embedding(x: Tensor, cos: Tensor, sin: Tensor, mode: int = 0) -> Tensor:
    """The operator that MindSpeed compiles from its own sources; the same rule."""
    return npu_rotary_mul(x, cos, sin, MODES[mode])


def npu_scaled_masked_softmax(
    x: Tensor, mask: Tensor, scale: float = 1.0, fixed_triu_mask: bool = False
) -> Tensor:
    """softmax over the last axis of scale * x; True in the mask shuts a score out with -10000."""
    assert x.dim() == 4, "the operator takes four axes"
    if fixed_triu_mask:
        mask = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    assert mask.dtype is torch.bool, f"a mask of {mask.dtype}"
    scores = (x.float() if x.dtype != torch.float64 else x) * scale
    return scores.masked_fill(mask, -10000.0).softmax(-1).to(x.dtype)


def npu_apply_adam_w(
    beta1_power: float,
    beta2_power: float,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: Tensor,
    max_grad_norm: Tensor | None,
    amsgrad: bool,
    maximize: bool,
    *,
    out: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """One AdamW step in place on out = (var, m, v): parameter, mean, mean of squares."""
    assert not amsgrad and max_grad_norm is None, "the stand-in does no amsgrad"
    var, m, v = out
    grad = (-grad if maximize else grad).to(m.dtype)
    with torch.no_grad():
        var.mul_(1 - lr * weight_decay)
        m.mul_(beta1).add_(grad, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        spread = (v / (1 - beta2_power)).sqrt_().add_(epsilon)
        var.addcdiv_(m, spread, value=-lr / (1 - beta1_power))
    return var, m, v


def npu_grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    bias: Sequence[Tensor] | None = None,
    group_list: Any = None,
    split_item: int = 0,
    group_type: int = -1,
    group_list_type: int = 0,
    **unsupported: Any,
) -> list[Tensor]:
    """One matmul for each group: its rows of x by its weight (group_type 0), or its rows of two
    tensors with each other (group_type 2).

    group_list: ends of the groups, or with group_list_type 1 their sizes
    """
    given = [name for name, value in unsupported.items() if value is not None]
    assert not given and not bias, f"the stand-in's npu_grouped_matmul does not do {given or bias}"
    assert len(x) == len(weight) == 1 and group_list is not None, "one tensor of all groups each"
    sizes = torch.as_tensor(group_list, dtype=torch.int64)
    if group_list_type == 0:
        sizes = torch.diff(sizes, prepend=sizes.new_zeros(1))
    rows = sizes.tolist()
    if group_type == 0:
        parts = zip(x[0].split(rows), weight[0].unbind(0), strict=True)
        return [torch.cat([part @ own for part, own in parts])]
    assert group_type == 2, f"group_type={group_type}"
    parts = zip(x[0].split(rows, -1), weight[0].split(rows), strict=True)
    return [torch.stack([part @ own for part, own in parts])]


def npu_moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """Tokens sorted by expert, and for each (token, choice) in order where it went.

    indices: [tokens] or [tokens, choices] expert numbers
    """
    assert not padded_mode, "the stand-in does no padded mode"
    choices = 1 if indices.dim() == 1 else indices.size(1)
    order = indices.flatten().argsort(stable=True)
    places = order.argsort(stable=True).to(torch.int32)
    kept = order[: num_out_tokens or len(order)]
    return tokens.index_select(0, kept // choices), places


def npu_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Any = None,
) -> Tensor:
    """The way back: each token is the sum over its choices, weighted by `probs`."""
    assert not padded_mode, "the stand-in does no padded mode"
    choices = 1 if probs is None else probs.size(1)
    tokens = permuted_tokens.index_select(0, sorted_indices.long())
    tokens = tokens.unflatten(0, (-1, choices))
    return (tokens if probs is None else tokens * probs[..., None]).sum(1)
