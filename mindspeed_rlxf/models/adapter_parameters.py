"""The parameter map of low-rank adapters (LoRA), and their values: no Megatron is needed.

Each adapted Hugging Face module has A [rank, in] and B [out, rank], as in PEFT. Rows of the
parameter map describe them, so checkpoints and export treat them as any other parameter. A
column-parallel linear splits B by rows over the tensor-parallel ranks, a row-parallel one A by
columns.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from mindspeed_rlxf.config.lora import LoraConfig
from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.models.parameters import (
    Head,
    Split,
    StageParameter,
    hf_shape,
    stage_parameters,
)

A = "lora_A"
B = "lora_B"
ADAPTERS = "adapters"  # submodule of an adapted linear


def adapter_parameters(
    table: Iterable[StageParameter], architecture: ArchitectureConfig, lora: LoraConfig
) -> Iterator[StageParameter]:
    """Yield A, then B for each adapted Hugging Face module in `table`, in its order."""
    for parameter in table:
        for source in adapted_sources(parameter, lora):
            module = source.removesuffix(".weight")
            name = f"{parameter.name.removesuffix('weight')}{ADAPTERS}.{module.rpartition('.')[2]}"
            outputs, inputs = hf_shape(source, architecture)
            is_row = parameter.split is Split.COLUMNS
            yield StageParameter(
                f"{name}_{A}",
                (f"{module}.{A}.weight",),
                Split.COLUMNS if is_row else Split.REPLICATED,
                shape=(lora.rank, inputs),
            )
            yield StageParameter(
                f"{name}_{B}",
                (f"{module}.{B}.weight",),
                Split.REPLICATED if is_row else Split.ROWS,
                shape=(outputs, lora.rank),
            )


def adapter_shapes(
    architecture: ArchitectureConfig, head: Head, lora: LoraConfig
) -> dict[str, tuple[int, ...]]:
    """Return the shape of each A and B of the whole model by Hugging Face name, in map order."""
    table = stage_parameters(architecture, head)
    return {p.sources[0]: p.shape for p in adapter_parameters(table, architecture, lora)}


def adapted_sources(parameter: StageParameter, lora: LoraConfig) -> list[str]:
    """List the Hugging Face weights in a linear's parameter that get adapters."""
    linear = parameter.split in (Split.QKV, Split.ROWS, Split.COLUMNS)
    if not linear or parameter.expert is not None or not parameter.name.endswith(".weight"):
        return []
    return [s for s in parameter.sources if lora.selects(s.removesuffix(".weight"))]


def initial_values(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return the first values of an A or B as PEFT chooses them, fp32: B is 0.

    A is uniform within 1 / sqrt(in). They depend on seed and Hugging Face name alone.
    """
    if name.endswith(f"{B}.weight"):
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(seed ^ crc32(name.encode()))
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def merge(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    """Add scale * B A, computed in fp32, to a whole weight in place, as PEFT merges it."""
    weight += (b.float() @ a.float() * scale).to(weight.dtype)


@contextlib.contextmanager
def switched_off(adapters: Iterable[Any]) -> Iterator[None]:
    """Compute without these modules' adapters inside the block."""
    modules = list(adapters)
    for module in modules:
        module.enable_adapters(False)
    try:
        yield
    finally:
        for module in modules:
            module.enable_adapters(True)
