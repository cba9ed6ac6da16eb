"""Low-rank adapters (LoRA, arXiv:2106.09685) on Megatron's column- and row-parallel linears.

A linear may join several Hugging Face modules (query, key and value; gate and up), each with its
own A and B. Tensor-parallel ranks exchange products with A, [tokens, rank], not inputs or outputs.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from torch import Tensor
from torch.nn import Parameter

from mindspeed_rlxf.config.lora import LoraConfig
from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.models.adapter_parameters import (
    ADAPTERS,
    A,
    B,
    adapted_sources,
    adapter_parameters,
)
from mindspeed_rlxf.models.parameters import Split, StageParameter, hf_shape, shard_shape


class LinearAdapters(torch.nn.Module):
    """The adapters of one linear on this rank: computes what they add to its output.

    Attributes:
        enabled: False = the linear computes without them.
    """

    def __init__(
        self, linear: Any, parameter: StageParameter, architecture: ArchitectureConfig, tp: int,
        lora: LoraConfig,
    ) -> None:  # fmt: skip
        """Allocate A and B like the linear's weight, unset, and mark them for Megatron."""
        super().__init__()
        self.enabled = True
        self.lora = lora
        self.is_row = parameter.split is Split.COLUMNS
        self.sequence_parallel = linear.sequence_parallel
        self.groups = architecture.kv_heads // tp if parameter.split is Split.QKV else 1
        # Rows of each source in a group, in the order of the linear's rows; all of it if one group.
        self.rows: dict[str, int] = {}
        for source in parameter.sources:
            num_rows = hf_shape(source, architecture)[0]
            if not self.is_row:
                num_rows //= tp
            self.rows[_module_name(source)] = num_rows // self.groups
        self.adapted = [_module_name(source) for source in adapted_sources(parameter, lora)]
        for adapter in adapter_parameters([parameter], architecture, lora):
            tensor = Parameter(linear.weight.new_empty(shard_shape(adapter, architecture, tp)))
            self.register_parameter(adapter.name.rpartition(".")[2], tensor)
            if adapter.split is not Split.REPLICATED:
                axis = 1 if adapter.split is Split.COLUMNS else 0
                tensor_parallel.set_tensor_model_parallel_attributes(tensor, True, axis, 1)
            elif self.sequence_parallel:  # each rank sees a part of the tokens
                tensor.sequence_parallel = True  # type: ignore[attr-defined]

    def enable_adapters(self, enabled: bool) -> None:
        """Switch them on or off, as PEFT's."""
        self.enabled = enabled

    def forward(self, inputs: Tensor) -> Tensor:
        """Return scale * B A x, 0 for modules without an adapter.

        Args:
            inputs: the linear's, [tokens, batch, in]; with sequence parallelism this rank's tokens
                for a column-parallel linear.

        Returns:
            Like the linear's output on this rank.
        """
        joined = torch.cat([self.get_parameter(f"{name}_{A}") for name in self.adapted])
        inner = F.linear(inputs, joined)
        inner = self._exchange(inner) * self.lora.scale
        inners = dict(zip(self.adapted, inner.split(self.lora.rank, -1), strict=True))
        outputs = []
        for name, rows in self.rows.items():
            shape = (*inner.shape[:-1], self.groups, rows)
            if name in inners:
                output = F.linear(inners[name], self.get_parameter(f"{name}_{B}"))
                outputs.append(output.view(shape))
            else:
                outputs.append(inner.new_zeros(shape))
        return torch.cat(outputs, -1).flatten(-2)

    def joined(self) -> tuple[Tensor, Tensor]:
        """Return A [modules * rank, in] and B [out, modules * rank] of all modules together.

        B has a block for each module, and zeros elsewhere. With one module they are the parameters,
        else copies.
        """
        a: list[Tensor] = [self.get_parameter(f"{module}_{A}") for module in self.adapted]
        if len(self.rows) == 1:
            return a[0], self.get_parameter(f"{self.adapted[0]}_{B}")
        rank = self.lora.rank
        inner = rank * len(self.adapted)
        block = a[0].new_zeros(self.groups, sum(self.rows.values()), inner)
        first_row = 0
        for module, rows in self.rows.items():
            if module in self.adapted:
                column = rank * self.adapted.index(module)
                b = self.get_parameter(f"{module}_{B}").view(self.groups, rows, rank)
                block[:, first_row : first_row + rows, column : column + rank] = b
            first_row += rows
        return torch.cat(a), block.flatten(0, 1)

    def _exchange(self, inner: Tensor) -> Tensor:
        """Exchange the products with A, so that a rank has those its product with B needs.

        Behind it a rank computes another part of the output than other ranks, so the backward pass
        sums their gradients: over rows in a column-parallel linear, over tokens with sequence
        parallelism.
        """
        if self.is_row:
            if self.sequence_parallel:
                return tensor_parallel.reduce_scatter_to_sequence_parallel_region(inner)
            return tensor_parallel.reduce_from_tensor_model_parallel_region(inner)
        if self.sequence_parallel:
            return tensor_parallel.gather_from_sequence_parallel_region(inner)
        return tensor_parallel.copy_to_tensor_model_parallel_region(inner)


def _module_name(source: str) -> str:
    """Return the last module of a weight: `q_proj` of `model.layers.0.self_attn.q_proj.weight`."""
    return source.split(".")[-2]


def attach_adapters(
    module: torch.nn.Module,
    table: Iterable[StageParameter],
    architecture: ArchitectureConfig,
    tp: int,
    lora: LoraConfig,
) -> None:
    """Freeze a stage's module but its score head, and attach trained adapters to its linears.

    `table` has the module's parameters. The adapters' values are unset.
    """
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name.endswith("score.weight"))
    for row in table:
        if adapted_sources(row, lora):
            linear: Any = module.get_submodule(row.name.removesuffix(".weight"))
            linear.add_module(ADAPTERS, LinearAdapters(linear, row, architecture, tp, lora))
            linear.register_forward_hook(_add_adapters)


def _add_adapters(linear: Any, inputs: tuple[Tensor, ...], output: Any) -> Any:
    if not linear.adapters.enabled:
        return output
    result, bias = output  # Megatron's linears return a bias that is added elsewhere
    return result + linear.adapters(inputs[0]), bias
