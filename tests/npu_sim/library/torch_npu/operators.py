"""Norm, activation, rotary, softmax, optimizer and expert operators of torch_npu in plain torch.

They follow the documentation of torch_npu; gradients come from torch's autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

MODES = {0: "half", 1: "interleave"}  # of rotary operators


def npu_rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Return x / rms(x) * gamma over the axes of gamma, and 1 / rms in fp32; compute in fp32."""
    assert self.dtype == gamma.dtype, f"input is {self.dtype}, gamma is {gamma.dtype}"
    axes = tuple(range(-gamma.dim(), 0))
    assert self.shape[-gamma.dim() :] == gamma.shape, "gamma must have the input's last axes"
    precise = torch.promote_types(self.dtype, torch.float32)
    wide = self.to(precise)
    reverse_rms = torch.rsqrt(wide.square().mean(axes, keepdim=True) + epsilon)
    return (wide * reverse_rms * gamma.to(precise)).to(self.dtype), reverse_rms


def npu_rms_norm_backward(
    dy: Tensor, self: Tensor, gamma: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of input and gamma. rstd: 1 / rms of the forward pass"""
    precise = torch.promote_types(self.dtype, torch.float32)
    grad, normed = dy.to(precise) * gamma.to(precise), self.to(precise) * rstd
    axes = tuple(range(-gamma.dim(), 0))
    dx = rstd * (grad - normed * (grad * normed).mean(axes, keepdim=True))
    dgamma = (dy.to(precise) * normed).flatten(0, self.dim() - gamma.dim() - 1).sum(0)
    return dx.to(self.dtype), dgamma.to(torch.float32)


def npu_swiglu(self: Tensor, dim: int = -1) -> Tensor:
    """Return swish(a) * b, where a and b are the two halves of one axis."""
    gate, up = self.chunk(2, dim)
    return gate * torch.sigmoid(gate) * up


def npu_rotary_mul(self: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    """Return x * r1 + rotated(x) * r2, all of four axes; r1 and r2 are broadcast."""
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
    """Compute npu_rotary_mul under the name and arguments that MindSpeed compiles it with."""
    return npu_rotary_mul(x, cos, sin, MODES[mode])


def npu_scaled_masked_softmax(
    x: Tensor, mask: Tensor, scale: float = 1.0, fixed_triu_mask: bool = False
) -> Tensor:
    """Return the softmax of scale * x over the last axis; masked (True) scores become -10000."""
    assert x.dim() == 4, "the operator takes four axes"
    if fixed_triu_mask:
        mask = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    assert mask.dtype is torch.bool, f"a mask of {mask.dtype}"
    scores = (x.float() if x.dtype != torch.float64 else x) * scale
    return scores.masked_fill(mask, -10000.0).softmax(-1).to(x.dtype)


def npu_apply_adam_w(
    beta1_power: float, beta2_power: float, lr: float, weight_decay: float, beta1: float,
    beta2: float, epsilon: float, grad: Tensor, max_grad_norm: Tensor | None, amsgrad: bool,
    maximize: bool, *, out: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Do one AdamW step in place on out = (var, m, v): parameter, mean and mean of squares."""
    assert not amsgrad and max_grad_norm is None, "there is no amsgrad"
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
    x: Sequence[Tensor], weight: Sequence[Tensor], *, bias: Sequence[Tensor] | None = None,
    group_list: Any = None, split_item: int = 0, group_type: int = -1, group_list_type: int = 0,
    **unsupported: Any,
) -> list[Tensor]:  # fmt: skip
    """Return one matmul for each group of rows.

    group_type: 0 = the group's rows of x times its own weight; 2 = the group's columns of x times
                its rows of weight
    group_list: ends of the groups, with group_list_type 1 their sizes
    """
    given = [name for name, value in unsupported.items() if value is not None]
    assert not given and not bias, f"npu_grouped_matmul does not do {given or bias}"
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
    """Return the tokens sorted by expert, and the new position of each (token, choice).

    indices: [tokens] or [tokens, choices] expert numbers
    """
    assert not padded_mode, "there is no padded mode"
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
    """Undo npu_moe_token_permute: return the sum of each token's choices, weighted by `probs`."""
    assert not padded_mode, "there is no padded mode"
    choices = 1 if probs is None else probs.size(1)
    tokens = permuted_tokens.index_select(0, sorted_indices.long())
    tokens = tokens.unflatten(0, (-1, choices))
    return (tokens if probs is None else tokens * probs[..., None]).sum(1)
