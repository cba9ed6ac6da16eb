"""Replace the operators that MindSpeed compiles from its own C++ sources against CANN.

MindSpeed calls `torch.utils.cpp_extension.load` with a name and sources; the replacement returns a
module that computes the same in plain torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import cpp_extension

from .operators import npu_rotary_position_embedding

MODULES = {
    "npu_rotary_position_embedding": SimpleNamespace(
        npu_rotary_position_embedding=npu_rotary_position_embedding
    )
}


def load(name: str, *args: Any, **kwargs: Any) -> Any:
    if name not in MODULES:
        raise AttributeError(f"the simulated torch_npu has no compiled operator {name!r}")
    return MODULES[name]


def with_int64_steps(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the CPU's fused AdamW, which counts steps in fp32, to take int64 counts as on NPU."""

    @functools.wraps(step)
    def wrapper(
        params: Any, grads: Any, means: Any, squares: Any, highs: Any, steps: Any, **options: Any
    ) -> None:
        steps = [count.float() for count in steps]
        step(params, grads, means, squares, highs, steps, **options)

    return wrapper


def apply() -> None:
    cpp_extension.load = load
    torch._fused_adamw_ = with_int64_steps(torch._fused_adamw_)
