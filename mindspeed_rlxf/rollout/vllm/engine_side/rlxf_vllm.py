"""What vLLM's workers import: they note which weights arrive, and look at what was loaded.

Importing it registers the weight-transfer backend `rlxf`. It needs vLLM and torch only: 0.32, or
0.23 under vllm-ascend, where workers restore and pack the layers themselves.
"""

import os
import runpy
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from rlxf_serve import end_with
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.lora_model import LoRAModel
from vllm.lora.utils import parse_fine_tuned_lora_name

end_with(os.getppid())
PEFT_PREFIX = "base_model.model."
_bit_sums = runpy.run_path(os.environ["RLXF_BIT_SUMS"])
bit_sum, bit_sums = _bit_sums["bit_sum"], _bit_sums["bit_sums"]


@dataclass
class Bucket(WeightTransferUpdateInfo):
    """Tensors as [name, dtype, shape, offset in bytes] in the file `path`."""

    path: str
    tensors: list[list[Any]]


class SharedMemory(WeightTransferEngine[WeightTransferInitInfo, Bucket]):
    """Loads buckets from a file in host memory, as if from a checkpoint."""

    init_info_cls, update_info_cls = WeightTransferInitInfo, Bucket

    def init_transfer_engine(self, init_info: Any) -> None:
        """Do nothing."""

    def start_weight_update(self) -> None:
        """Restore the layers as they were before they were packed."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """Pack the layers that are not packed yet, and a tied head, which stays as it was."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        for module in packed_layers(self.model).values():
            if type(module).__name__ == "ParallelLMHead":
                module.quant_method.process_weights_after_loading(module)

    def receive_weights(self, update_info: Bucket, load_weights: Any = None) -> None:
        """Copy the tensors, because the loader keeps them until a layer is complete, and load."""
        where, found = getattr(self, "device", torch.get_default_device()), []
        size = os.stat(update_info.path).st_size
        memory = torch.from_file(update_info.path, size=size, dtype=torch.uint8)
        for name, kind, shape, offset in update_info.tensors:
            dtype, count = getattr(torch, kind), torch.Size(shape).numel()
            flat = memory[offset : offset + count * dtype.itemsize].view(dtype)
            found.append((name, flat.view(shape).to(where, copy=True)))
        (load_weights or self.model.load_weights)(found)

    def shutdown(self) -> None:
        """Do nothing."""


if os.environ["RLXF_TRANSPORT"] == "ipc":
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine as Transport
elif os.environ["RLXF_TRANSPORT"] == "npu_ipc":
    from vllm_ascend.distributed.weight_transfer.npu_ipc_engine import (
        NPUIPCWeightTransferEngine as Transport,
    )
else:
    Transport = SharedMemory


class Noting(Transport):  # type: ignore[misc, valid-type]
    """Notes each tensor before it is loaded."""

    def receive_weights(self, update_info: Any, load_weights: Any = None) -> None:
        """Receive by the transport, and note."""
        loads = load_weights or self.model.load_weights

        def load(weights: Any) -> Any:
            weights = list(weights)
            totals = bit_sums([tensor for _, tensor in weights])
            for (name, tensor), total in zip(weights, totals, strict=True):
                self.arrived.setdefault(name, []).append(total)
                self.forms[name] = tuple(tensor.shape), tensor.dtype
            return loads(weights)

        if load_weights:  # vLLM 0.23
            super().receive_weights(update_info, load)
            return
        self.model.load_weights = load
        try:
            super().receive_weights(update_info)
        finally:
            del self.model.load_weights  # the method of the class remains


WeightTransferEngineFactory.register_engine("rlxf", Noting)


def packed_layers(model: Any) -> dict[str, Any]:
    """Return name -> layer of those that compute with a packed form of their weights (on CPU)."""
    layers = {path: m for path, m in model.named_modules() if hasattr(m, "cpu_linear")}
    named = {path.removesuffix(".base_layer"): m for path, m in layers.items()}
    return {path: m for path, m in named.items() if not path.endswith("embed_tokens")}


noted_adapter = dict[str, tuple[int, torch.Size]]()
"""Bit sum and shape of each tensor of the adapter that was read last, by name."""


def note_adapters() -> None:
    """Have vLLM note the tensors of an adapter as it reads them."""
    read = LoRAModel.from_lora_tensors.__func__  # type: ignore[attr-defined]

    def noting(
        cls: Any, lora_model_id: int, tensors: dict[str, Any], *more: Any, **keys: Any
    ) -> Any:
        noted_adapter.clear()
        for name, tensor in tensors.items():
            noted_adapter[name.removeprefix(PEFT_PREFIX)] = bit_sum(tensor), tensor.shape
        return read(cls, lora_model_id, tensors, *more, **keys)

    LoRAModel.from_lora_tensors = classmethod(noting)  # type: ignore[assignment]


note_adapters()


class Extension:
    """Methods of every worker, called by `/collective_rpc`."""

    def rlxf_begin_adapter(self: Any, version: str, *names: str) -> list[str]:
        """Begin to load an adapter with these tensors; return the modules that have no adapter."""
        self.rlxf_adapter_version = version
        noted_adapter.clear()
        manager = self.model_runner.lora_manager._adapter_manager
        renames = getattr(manager.model, "hf_to_vllm_mapper", None)
        mapper = None if renames is None else renames.get_rename_mapper()
        able = set(manager.modules)
        for path in manager.modules:
            prefix, _, last = path.rpartition(".")
            able |= {f"{prefix}.{part}" for part in manager.packed_modules_mapping.get(last, ())}
        unable = [n for n in names if parse_fine_tuned_lora_name(n, mapper)[0] not in able]
        return sorted({name.rpartition(".lora_")[0] for name in unable})

    def rlxf_adapter(self: Any) -> dict[str, Any]:
        """Return which adapter was loaded, in the form of `rlxf_receipt`.

        `loaded`: bit sums of each A, of the only worker. B is there with its factor.
        """
        manager = self.model_runner.lora_manager._adapter_manager
        alone = self.parallel_config.world_size == 1
        return {
            "version": self.rlxf_adapter_version,
            "received": {name: [total] for name, (total, _) in noted_adapter.items()},
            "loaded": look_at_adapter(manager) if alone else {},
            "stale": [],
        }

    def rlxf_begin(self: Any, version: str) -> None:
        """Begin an update: forget what earlier ones brought."""
        engine, self.rlxf_version = self.weight_transfer_engine, version
        engine.arrived, engine.forms = {}, {}
        layers = packed_layers(self.model_runner.model)
        self.rlxf_packed = {path: weakref.ref(layer.cpu_linear) for path, layer in layers.items()}

    def rlxf_receipt(self: Any) -> dict[str, Any]:
        """Return what the update brought.

        `received`: name -> bit sum for each arrival. `loaded`, of the only worker: name -> bit sum
        of a loaded tensor that can be compared. `stale`: names of layers that were not packed anew;
        packing makes another object.
        """
        engine, model = self.weight_transfer_engine, self.model_runner.model
        alone = self.parallel_config.world_size == 1
        return {
            "version": self.rlxf_version,
            "received": engine.arrived,
            "loaded": look_at_layers(model, engine.arrived, engine.forms) if alone else {},
            "stale": [
                f"{path}.weight"
                for path, layer in packed_layers(model).items()
                if self.rlxf_packed[path]() is layer.cpu_linear
            ],
        }


def look_at_adapter(manager: Any) -> dict[str, int]:
    """Return the bit sums of each A in the memory that layers compute with."""
    newest = max(number for number in manager.lora_index_to_id if number is not None)
    slot, loaded = manager.lora_index_to_id.index(newest), dict[str, int]()
    for path, layer in manager.modules.items():
        prefix, _, last = path.rpartition(".")
        parts = manager.packed_modules_mapping.get(last, [last])
        for part, stacked in zip(parts, layer.lora_a_stacked, strict=True):
            name = f"{prefix}.{part}.lora_A.weight"
            if name in noted_adapter:
                rows, columns = noted_adapter[name][1]
                loaded[name] = bit_sum(stacked[slot, 0, :rows, :columns].contiguous())
    return loaded


def look_at_layers(
    model: Any, arrived: dict[str, list[int]], forms: dict[str, tuple[Any, Any]]
) -> dict[str, int]:
    """Return the bit sums of tensors in their order in fused layers, as they were sent.

    Args:
        model: The model that generates.
        arrived: Name -> bit sums of those received.
        forms: Name -> shape and dtype of those received.
    """
    fused = getattr(model, "packed_modules_mapping", None) or {}
    loaded = dict[str, int]()
    for name, parameter in model.named_parameters():
        path, _, leaf = name.replace(".base_layer.", ".").rpartition(".")  # of adapted layers
        prefix, _, last = path.rpartition(".")
        parts = [f"{prefix}.{part}.{leaf}".lstrip(".") for part in fused.get(last, [last])]
        if not parameter.numel() or not all(part in forms for part in parts):
            continue
        start = 0
        for part in parts:
            shape, dtype = forms[part]
            rows = shape[0] if shape else 1
            piece = parameter[start : start + rows] if parameter.dim() else parameter
            start += rows
            sums = [bit_sum(form) for form in as_sent(parameter, piece, shape, dtype)]
            if sums:
                loaded[part] = arrived[part][0] if arrived[part][0] in sums else sums[0]
    return loaded


def as_sent(parameter: Any, piece: Any, shape: Any, dtype: Any) -> list[torch.Tensor]:
    """Return what may be the tensor that was sent, in its dtype: nothing if vLLM changed it.

    vLLM keeps some parameters in fp32 (`A_log`, `e_score_correction_bias`), which gives the bits
    back; a narrower one does not. A Conv1D is stored transposed, which a square one does not show.
    """
    sizes = [size for size in shape if size != 1]
    forms = [piece] if [size for size in piece.shape if size != 1] == sizes else []
    if len(shape) == 2 and tuple(parameter.shape) == (shape[1], shape[0]):
        forms.append(parameter.t())
    if not dtype.is_floating_point or not parameter.dtype.is_floating_point:
        return forms if parameter.dtype == dtype else []
    if parameter.dtype != dtype and parameter.element_size() <= dtype.itemsize:
        return []
    return [form.to(dtype) for form in forms]
