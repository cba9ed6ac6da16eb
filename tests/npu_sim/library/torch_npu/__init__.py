"""torch_npu of the simulated device.

A name that it lacks raises an AttributeError with the name; no name is created on demand.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from tests.npu_sim import build, rules, watch

MIB = 1024**2
__version__ = torch.__version__.partition("+")[0]  # the device layer requires that of torch

device = build.load()
listed = [n for n in os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "").split(",") if n.strip()]
device.set_devices(
    len(listed) or int(os.environ.get("RLXF_SIM_DEVICES", "1")),
    int(os.environ.get("RLXF_SIM_MEMORY_MIB", "65536")) * MIB,
)
device.start()
device.set_rules(rules.of_operators())
torch.utils.rename_privateuse1_backend("npu")

from . import _C, compiled, npu, profiler, records  # noqa: E402
from .attention import npu_fusion_attention, npu_fusion_attention_grad  # noqa: E402, F401
from .operators import (  # noqa: E402, F401
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

unsupported_dtype = [torch.quint8, torch.quint4x2, torch.quint2x4, torch.qint32, torch.qint8]
__all__ = [*[name for name in dir() if name.startswith("npu_")], "_C", "npu", "profiler"]


def __getattr__(name: str) -> Any:
    raise AttributeError(f"the simulated torch_npu has no {name!r}")


torch._register_device_module("npu", npu)
torch.utils.generate_methods_for_privateuse1_backend()
torch.nn.functional.scaled_dot_product_attention = rules.checked_attention(
    torch.nn.functional.scaled_dot_product_attention
)
compiled.apply()
npu.register_hccl()
npu.follow_environment()
watch.follow_environment()
if records.FOLDER:
    for name in __all__:
        if name.startswith("npu_"):
            globals()[name] = records.recorded(name, globals()[name])
    torch._fused_adamw_ = records.recorded("optimizer", torch._fused_adamw_)
