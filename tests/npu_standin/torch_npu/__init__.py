"""Stand-in for torch_npu: its operators compute on the CPU, its device is the CPU."""

from __future__ import annotations

from typing import Any

import torch

from . import _C, compiled, npu, profiler, records
from .attention import (
    npu_fusion_attention,
    npu_fusion_attention_grad,
    scaled_dot_product_attention,
)
from .operators import (
    npu_apply_adam_w,
    npu_grouped_matmul,
    npu_moe_token_permute,
    npu_moe_token_unpermute,
    npu_rms_norm,
    npu_rms_norm_backward,
    npu_rotary_mul,
    npu_scaled_masked_softmax,
    npu_swiglu,
)

__version__ = "2.7.1"
unsupported_dtype = [torch.quint8, torch.quint4x2, torch.quint2x4, torch.qint32, torch.qint8]
__all__ = [
    "_C",
    "npu",
    "npu_apply_adam_w",
    "npu_fusion_attention",
    "npu_fusion_attention_grad",
    "npu_grouped_matmul",
    "npu_moe_token_permute",
    "npu_moe_token_unpermute",
    "npu_rms_norm",
    "npu_rms_norm_backward",
    "npu_rotary_mul",
    "npu_scaled_masked_softmax",
    "npu_swiglu",
    "profiler",
]


def __getattr__(name: str) -> Any:
    raise AttributeError(f"the stand-in for torch_npu has no {name!r}")


torch.utils.rename_privateuse1_backend("npu")
torch._register_device_module("npu", npu)
torch.Tensor.npu = lambda self, *args, **kwargs: self
torch.nn.functional.scaled_dot_product_attention = scaled_dot_product_attention
compiled.apply()
if records.FOLDER:
    for name in __all__:
        if name.startswith("npu_"):
            globals()[name] = records.recorded(name, globals()[name])
    torch._fused_adamw_ = records.recorded("optimizer", torch._fused_adamw_)
