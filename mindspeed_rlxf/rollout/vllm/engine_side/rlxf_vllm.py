"""What vLLM's workers import: they note which weights arrive, and look at what was loaded.

Importing it registers the weight-transfer backend `rlxf`. It needs vLLM and torch only: 0.32, or
0.23 under vllm-ascend, where workers restore and pack the layers themselves.
"""

import mmap
import os
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from rlxf_serve import end_with
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

end_with(os.getppid())


def bit_sum(tensor: torch.Tensor) -> int:
    """Return what `mindspeed_rlxf.rollout.transfer.bit_sum` describes."""
    halves = tensor.detach().contiguous().view(-1, 1).view(torch.int16)
    parts = []
    for part in halves.split(2**24):
        padded = F.pad(part.float(), (0, 0, 0, -len(part) % 512))
        parts.append(padded.unflatten(0, (-1, 512)).sum(dim=1))
    sums = torch.cat(parts).flatten().cpu().long()
    return int((sums * torch.arange(1, len(sums) + 1)).sum())


def question(size: int) -> torch.Tensor:
    """Return the [size] fp32 input on which a loaded layer is compared with its weights."""
    return torch.cos(torch.arange(size, dtype=torch.float32) * 0.7)


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
        """Pack the layers that are not packed yet."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def receive_weights(self, update_info: Bucket, load_weights: Any = None) -> None:
        """Copy the tensors, because the loader keeps them until a layer is complete, and load."""
        where, found = getattr(self, "device", torch.get_default_device()), []
        with open(update_info.path, "rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        for name, kind, shape, offset in update_info.tensors:
            dtype, count = getattr(torch, kind), torch.Size(shape).numel()
            flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
            found.append((name, flat.view(shape).to(where, copy=True)))
        (load_weights or self.model.load_weights)(found)

    def shutdown(self) -> None:
        """Do nothing."""


@dataclass
class Arrival:
    """What came under one name: a bit sum each time, rows, and the product with `question`."""

    sums: list[int]
    rows: int
    product: Any


def noting(base: type[Any]) -> type[Any]:
    """Return a subclass of a weight-transfer engine that notes each tensor before it is loaded."""

    class Noting(base):  # type: ignore[misc]
        def parse_update_info(self, update_dict: dict[str, Any]) -> Any:
            if "path" in update_dict:  # on devices, weights that are sent again
                return Bucket(**update_dict)
            return super().parse_update_info(update_dict)

        def receive_weights(self, update_info: Any, load_weights: Any = None) -> None:
            receive = super().receive_weights
            if isinstance(update_info, Bucket):
                receive = partial(SharedMemory.receive_weights, self)

            def load(weights: Any) -> Any:
                return loads(self.note(list(weights)))

            if loads := load_weights:  # vLLM 0.23
                return receive(update_info, load)
            loads, self.model.load_weights = self.model.load_weights, load
            try:
                receive(update_info)
            finally:
                del self.model.load_weights  # the method of the class remains

        def note(self, weights: list[tuple[str, torch.Tensor]]) -> Any:
            for name, tensor in weights:
                product = None
                if tensor.ndim == 2 and tensor.device.type == "cpu":  # only there layers are asked
                    product = tensor.float() @ question(tensor.shape[1])
                arrival = self.arrived.setdefault(name, Arrival([], len(tensor), product))
                arrival.sums.append(bit_sum(tensor))
            return weights

    return Noting


def transport() -> type[Any]:
    """Return the engine class that RLXF_TRANSPORT names."""
    if os.environ["RLXF_TRANSPORT"] == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine as Chosen
    elif os.environ["RLXF_TRANSPORT"] == "npu_ipc":
        from vllm_ascend.distributed.weight_transfer.npu_ipc_engine import (
            NPUIPCWeightTransferEngine as Chosen,
        )
    else:
        Chosen = SharedMemory
    return Chosen


WeightTransferEngineFactory.register_engine("rlxf", noting(transport()))


class Extension:
    """Methods of every worker, called by `/collective_rpc`."""

    def rlxf_begin(self: Any) -> None:
        """Forget what earlier updates brought; note the packed layers that must be replaced."""
        self.weight_transfer_engine.arrived = {}
        for module in self.model_runner.model.modules():
            if hasattr(module, "cpu_linear"):
                module.rlxf_packed = weakref.ref(module.cpu_linear)

    def rlxf_finish(self: Any, version: str) -> None:
        """Repack a tied head, which stays as it was before the update (on CPU)."""
        for module in self.model_runner.model.modules():
            if type(module).__name__ == "ParallelLMHead" and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)
        self.rlxf_version = version

    def rlxf_receipt(self: Any) -> dict[str, Any]:
        """Return `version`; `received`: name -> bit sum for each arrival; `loaded`, `answers`.

        The last two are of the only worker: name -> bit sum of a loaded tensor that can be read,
        name -> relative error of a layer that can only be asked, 1 if it was not packed anew.
        """
        loaded: dict[str, int] = {}
        answers: dict[str, float] = {}
        arrived = self.weight_transfer_engine.arrived
        if self.parallel_config.world_size == 1:
            loaded, answers = look_at_layers(self.model_runner.model, arrived)
        received = {name: arrival.sums for name, arrival in arrived.items()}
        version = getattr(self, "rlxf_version", "")
        return {"version": version, "received": received, "loaded": loaded, "answers": answers}


@torch.no_grad()
def look_at_layers(model: Any, arrived: dict[str, Arrival]) -> tuple[Any, Any]:
    """Return `loaded` and `answers`; a layer of several tensors has the name of the first."""
    fused = getattr(model, "packed_modules_mapping", None) or {}
    loaded, answers = dict[str, int](), dict[str, float]()
    for path, module in model.named_modules():
        prefix, _, last = path.rpartition(".")
        for leaf, parameter in module.named_parameters(recurse=False):
            parts = [f"{prefix}.{part}.{leaf}".lstrip(".") for part in fused.get(last, [last])]
            if path == "lm_head" and parts[0] not in arrived:  # tied
                parts = [name for name in arrived if name.endswith("embed_tokens.weight")]
            arrivals = [arrived[name] for name in parts if name in arrived]
            if len(arrivals) < len(parts) or not parts:
                continue
            start = 0
            for name, arrival in zip(parts, arrivals, strict=True):
                if parameter.numel():
                    loaded[name] = bit_sum(parameter[start : start + arrival.rows])
                start += arrival.rows
            if leaf == "weight" and hasattr(module, "cpu_linear") and last != "embed_tokens":
                size = getattr(module, "input_size", 0) or module.embedding_dim
                asked = question(size)[None].to(parameter.dtype)
                given = module.quant_method.apply(module, asked)[0, :start].float()
                wanted = torch.cat([arrival.product for arrival in arrivals])
                name = f"{path}.weight" if path == "lm_head" else parts[0]
                error = (given - wanted).abs().max() / wanted.abs().max().clamp(min=1e-20)
                # Packing makes another object, also where the weights differ too little to tell.
                answers[name] = 1.0 if module.rlxf_packed() is module.cpu_linear else float(error)
    return loaded, answers
