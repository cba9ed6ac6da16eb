"""What is rehearsed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}


@dataclass(frozen=True)
class Case:
    ranks: int = 1
    layout: dict[str, Any] = field(default_factory=dict)  # keys of every role
    sections: dict[str, Any] = field(default_factory=dict)
    architecture: str = "PLAIN"  # of tests.distributed.llamas
    generates: bool = False  # responses of its own, else fixed ones
    uncalled: tuple[str, ...] = ()  # operators of the list below that it has no use for


# What every rank of every case has to call: torch_npu's operators, and the functions of PATHS.
OPERATORS = ("npu_fusion_attention", "npu_rms_norm", "npu_swiglu", "rotary", "optimizer")
# MindSpeed's paths that end in no operator of torch_npu, each by (module, name) that it looks up at
# every call: its rotary function computes in plain torch unless told to fuse, and its AdamW calls
# torch's fused one. Megatron's own function and optimizer use neither.
PATHS = {
    "rotary": ("mindspeed.core.fusions.fused_rope", "_rotate_half"),
    "optimizer": ("torch", "_fused_adamw_"),
}


def operators_of(real: bool, names: tuple[str, ...] = OPERATORS) -> tuple[str, ...]:
    """Those that have to be called. real: by MindSpeed itself, else by the small adaptor"""
    return names if real else tuple(name for name in names if name not in PATHS)


CASES = {
    "tp1": Case(),
    "tp1 generates": Case(generates=True),
    "tp1 padded": Case(layout={"packed_sequences": False}),
    "tp2": Case(2, TP2),
    "tp2 sequence parallel": Case(2, {**TP2, "sequence_parallel": True}),
    "pp2": Case(2, PP2),
    "dp2 distributed optimizer": Case(
        2, sections={"optimizer": {"use_distributed_optimizer": True}}
    ),
    "qwen3": Case(architecture="QWEN3"),
    # Experts weigh what they activate: Megatron has another function for it.
    "experts": Case(architecture="QWEN3_MOE", uncalled=("npu_swiglu",)),
    "experts ep2": Case(
        2,
        {"expert_model_parallel_size": 2},
        architecture="QWEN3_MOE",
        uncalled=("npu_swiglu",),
    ),
}
REQUIRED = ("tp1", "tp1 generates", "tp1 padded", "tp2", "pp2", "dp2 distributed optimizer")
