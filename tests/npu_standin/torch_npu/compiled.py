"""Operators that MindSpeed compiles from its own C++ sources against CANN: none is compiled here.

It calls `torch.utils.cpp_extension.load` by name and sources; the stand-in answers with modules
that compute the same.
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
        raise AttributeError(f"the stand-in has no compiled operator {name!r}")
    return MODULES[name]


def whole_steps(step: Callable[..., Any]) -> Callable[..., Any]:
    """The NPU's fused AdamW counts steps in int64, the CPU's in fp32."""

    @functools.wraps(step)
    def wrapper(
        params: Any, grads: Any, means: Any, squares: Any, highs: Any, steps: Any, **options: Any
    ) -> None:
        steps = [count.float() for count in steps]
        step(params, grads, means, squares, highs, steps, **options)

    return wrapper


def apply() -> None:
    cpp_extension.load = load
    torch._fused_adamw_ = whole_steps(torch._fused_adamw_)
