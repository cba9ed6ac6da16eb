"""PEFT's low-rank adapters in a model of transformers.

Names of parameters lose what PEFT puts into them, so `q_proj.weight` is the frozen weight,
`q_proj.lora_A.weight` and `q_proj.lora_B.weight` are its adapter.
"""

from __future__ import annotations

from typing import Any

import torch
from packaging.version import Version
from torch import nn

from mindspeed_rlxf.config.lora import LoraConfig, can_adapt
from mindspeed_rlxf.config.problems import Problem, UserError
from mindspeed_rlxf.models.adapter_parameters import A, B
from mindspeed_rlxf.models.parameters import Head

OUTPUT = "lm_head.weight"
MIXED_SINCE = Version("2.13")
"""First torch whose shards may have other dtypes than frozen weights beside them."""


def inject(model: Any, lora: LoraConfig) -> None:
    """Add adapters to the model's linears, on the meta device and fp32; freeze the rest.

    Raises:
        UserError: PEFT is missing, or nothing is selected; keys are those of the role.
    """
    try:
        from peft import LoraConfig as PeftConfig, inject_adapter_in_model
    except ImportError:
        rule = "needs the package peft with backend=fsdp"
        raise UserError(Problem("lora.rank", rule, lora.rank, "install it")) from None
    modules = linear_modules(model)
    chosen = [name for name in modules if lora.selects(name)]
    if not chosen:
        raise UserError(lora.selects_nothing(modules, type(model).__name__))
    config = PeftConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        target_modules=chosen,
    )
    inject_adapter_in_model(config, model, low_cpu_mem_usage=True)
    for name, parameter in model.named_parameters():
        if is_adapter(plain_name(name)):
            parameter.data = parameter.data.float()


def linear_modules(model: Any) -> list[str]:
    """Return the names of the modules that can have adapters: no router, expert or output layer."""
    return [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module is not model.lm_head and can_adapt(name)
    ]


def trained_names(model: Any, lora: LoraConfig, head: Head) -> list[str]:
    """Return the names of trained parameters: all, or with adapters these and a score head."""
    names = [name for name, _ in model.named_parameters()]
    if not lora.rank:
        return names
    score = [OUTPUT] if head is Head.SCORE else []
    return score + [name for name in names if is_adapter(plain_name(name))]


def plain_name(name: str) -> str:
    """Return a parameter's name without what PEFT puts into it."""
    return name.replace(".base_layer.", ".").replace(".default.", ".")


def is_adapter(name: str) -> bool:
    """Return whether a parameter is an adapter's A or B, by its plain name."""
    return name.endswith((f".{A}.weight", f".{B}.weight"))


def frozen_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that frozen weights can have beside fp32 adapters: `dtype`, or fp32."""
    release = Version(torch.__version__).release
    return dtype if release >= MIXED_SINCE.release else torch.float32
