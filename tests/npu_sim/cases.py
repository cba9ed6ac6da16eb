"""The cases that `run` compares: layouts, architectures and options of a run."""

from dataclasses import dataclass, field
from typing import Any

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}


@dataclass(frozen=True)
class Case:
    ranks: int = 1
    layout: dict[str, Any] = field(default_factory=dict)  # keys of every role
    sections: dict[str, Any] = field(default_factory=dict)  # keys by section
    architecture: str = "PLAIN"  # a name of tests.distributed.llamas
    generates: bool = False  # whether it samples responses, instead of using fixed ones
    uncalled: tuple[str, ...] = ()  # names of OPERATORS that this case does not call


# What every rank has to call: operators of torch_npu, and the functions of PATHS.
OPERATORS = ("npu_fusion_attention", "npu_rms_norm", "npu_swiglu", "rotary", "optimizer")
# Functions of MindSpeed that call no operator of torch_npu, by the (module, name) that it looks up
# at every call: its rotary function computes in plain torch unless fusion is configured, and its
# AdamW calls torch's fused one. Megatron's own rotary function and optimizer call neither.
PATHS = {
    "rotary": ("mindspeed.core.fusions.fused_rope", "_rotate_half"),
    "optimizer": ("torch", "_fused_adamw_"),
}


def operators_of(real: bool, names: tuple[str, ...] = OPERATORS) -> tuple[str, ...]:
    """Return the operators that have to be called.

    real: MindSpeed itself runs; else the small adaptor of tests/npu_sim, which has none of PATHS
    """
    return names if real else tuple(name for name in names if name not in PATHS)


CASES = {
    "tp1": Case(),
    # Short, because `make test` runs it.
    "tp1 generates": Case(sections={"training": {"train_iters": 2}}, generates=True),
    "tp1 padded": Case(layout={"packed_sequences": False}),
    # At a tenth of the usual rate: the length of Adam's first steps does not depend on the
    # gradient's size, so rounding moved a weight by 9.4e-6 before.
    "tp2": Case(
        2, TP2, {"training": {"train_iters": 2}, "optimizer": {"lr": 1e-4}}, generates=True
    ),
    "tp2 sequence parallel": Case(2, {**TP2, "sequence_parallel": True}),
    "pp2": Case(2, PP2),
    "cp2": Case(2, {"context_parallel_size": 2}, {"training": {"train_iters": 2}}, generates=True),
    "dp2 distributed optimizer": Case(
        2, sections={"optimizer": {"use_distributed_optimizer": True}}
    ),
    "qwen3": Case(architecture="QWEN3"),
    # In fp32 its attention is torch's; it has no Megatron and no MindSpeed.
    "fsdp dp2": Case(2, {"backend": "fsdp"}, uncalled=OPERATORS),
    # Megatron has another activation function for experts, which also applies their weights.
    "experts": Case(architecture="QWEN3_MOE", uncalled=("npu_swiglu",)),
    "experts ep2": Case(
        2, {"expert_model_parallel_size": 2}, architecture="QWEN3_MOE", uncalled=("npu_swiglu",)
    ),
}
