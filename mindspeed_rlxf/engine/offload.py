"""Move parts of an engine between device and host memory.

Storages are moved, not tensors. A storage is freed by setting its size to 0 and allocated again at
its old size, so all tensors that view it stay valid: parameters, views of Megatron's buffers,
gradients, the weights that a rollout shares.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mindspeed_rlxf import device
from mindspeed_rlxf.device.copies import CopyStream, host_buffer
from mindspeed_rlxf.engine.protocol import Part

CHUNK_BYTES = 2**28  # of host memory allocated at once; torch rounds up to a power of two
ALIGNMENT = 512

Tensors = Callable[[], Iterable[Tensor]]


@dataclass
class _Storage:
    """A storage of the device, with its place in host memory.

    tensor: one that views it
    pieces: [bytes] uint8 of the host, in order; none where nothing is copied
    """

    tensor: Tensor
    num_bytes: int
    pieces: list[Tensor] = field(default_factory=list)

    def resize(self, num_bytes: int) -> None:
        self.tensor.untyped_storage().resize_(num_bytes)

    def on_device(self) -> Tensor:
        """Return the whole storage as a tensor [elements]."""
        return self.tensor.as_strided((self.num_bytes // self.tensor.itemsize,), (1,), 0)

    @property
    def on_host(self) -> list[Tensor]:
        """The pieces on the host, viewed in the storage's dtype."""
        return [piece.view(self.tensor.dtype) for piece in self.pieces]

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (piece on the device, the same piece on the host)."""
        hosts = self.on_host
        devices = self.on_device().split([host.numel() for host in hosts])
        yield from zip(devices, hosts, strict=True)

    def read(self, start: int, stop: int) -> Tensor:
        """Return a copy of elements `start` to `stop` from the host, [stop - start]."""
        copied, at = torch.empty(stop - start, dtype=self.tensor.dtype), 0
        for piece in self.on_host:
            first, last = max(start, at), min(stop, at + piece.numel())
            if first < last:
                copied[first - start : last - start] = piece[first - at : last - at]
            at += piece.numel()
        return copied


class _HostMemory:
    """Chunks of host memory in which storages get their places; they are never freed."""

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []
        self._free = 0  # bytes of the last chunk

    def place(self, storages: list[_Storage]) -> None:
        """Give storages their pieces; allocate host memory for all of them together."""
        wanted = sum(_aligned(each.num_bytes) for each in storages) - self._free
        for each in storages:
            missing = each.num_bytes
            while missing > 0:
                if not self._free:
                    self._free = min(wanted, CHUNK_BYTES)
                    wanted -= self._free
                    self._chunks.append(host_buffer(self._free))
                start = len(self._chunks[-1]) - self._free
                size = min(missing, self._free)
                each.pieces.append(self._chunks[-1][start : start + size])
                self._free -= min(_aligned(size), self._free)
                missing -= size


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class _MovedPart:
    """The storages of one part.

    tensors:   returns the part's present tensors; the optimizer makes some in its first step
    is_copied: False = the part is freed without a copy, and is zeros when it returns
    """

    def __init__(self, tensors: Tensors, copies: CopyStream, is_copied: bool) -> None:
        self._tensors, self._copies, self._is_copied = tensors, copies, is_copied
        self._host = _HostMemory()
        self._storages: dict[int, _Storage] = {}
        self._arrived: Any = None  # event of the last copies to the device
        self.is_away, self.is_changed = False, True

    def offload(self) -> None:
        """Copy what has changed to the host, wait for the copies, and free the storages."""
        if self.is_away:
            return
        self._find()
        self._copies.finish()  # those to the device may be under way
        if self._is_copied and self.is_changed:
            with self._copies.copying():
                for each in self._storages.values():
                    for on_device, host in each.pairs():
                        host.copy_(on_device, non_blocking=True)
            self._copies.finish()
        self._free()
        self.is_away, self.is_changed = True, False

    def onload(self) -> None:
        """Allocate the storages and start to fill them; `arrive` waits for that."""
        if not self.is_away:
            return
        try:
            for each in self._storages.values():
                each.resize(each.num_bytes)
        except RuntimeError:  # out of memory: the copies on the host stay valid
            self._free()
            raise
        if self._is_copied:
            with self._copies.copying():
                for each in self._storages.values():
                    for on_device, host in each.pairs():
                        on_device.copy_(host, non_blocking=True)
            self._arrived = self._copies.mark()
        else:
            for each in self._storages.values():
                each.on_device().zero_()
        self.is_away = False

    def arrive(self) -> None:
        """Let work launched from now on wait for the copies to the device."""
        arrived, self._arrived = self._arrived, None
        if arrived is not None:
            self._copies.join(arrived)

    def find(self, tensor: Tensor) -> _Storage | None:
        """Return the storage of a tensor if it is of this part and on the host, else None."""
        return self._storages.get(_key(tensor)) if self.is_away else None

    def _find(self) -> None:
        """Add new storages, with places on the host."""
        new: dict[int, _Storage] = {}
        for tensor in self._tensors():
            storage = tensor.untyped_storage()
            if _key(tensor) not in self._storages and storage.nbytes():
                new[_key(tensor)] = _Storage(tensor.detach(), storage.nbytes())
        if self._is_copied:
            self._host.place(list(new.values()))
            self.is_changed = self.is_changed or bool(new)
        self._storages |= new

    def _free(self) -> None:
        for each in self._storages.values():
            each.resize(0)


def _key(tensor: Tensor) -> int:
    """Identify a tensor's storage, also while it has no memory."""
    return tensor.untyped_storage()._cdata


class Offload:
    """The parts of one engine that may leave the device.

    movable: parts that move to the host when another engine of the process needs the device
    """

    def __init__(self, tensors: Mapping[Part, Tensors], movable: Collection[Part]) -> None:
        copies = CopyStream()
        self.movable = frozenset(movable) & frozenset(tensors)
        self._parts = {
            part: _MovedPart(found, copies, is_copied=part is not Part.GRADIENTS)
            for part, found in tensors.items()
        }

    def offload(self, parts: Collection[Part]) -> None:
        """Copy what has changed of these parts to the host, and free their storages."""
        for part in self._named(parts):
            self._parts[part].offload()

    def onload(self, parts: Collection[Part]) -> None:
        """Allocate the storages of these parts again and start to fill them."""
        for part in self._named(parts):
            self._parts[part].onload()

    def arrive(self, *parts: Part) -> None:
        """Let work launched from now on wait for the copies of these parts."""
        for part in self._named(parts):
            self._parts[part].arrive()

    def change(self, *parts: Part) -> None:
        """Mark the host copies of these parts as out of date."""
        for part in self._named(parts):
            self._parts[part].is_changed = True

    def read(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """Return elements `start` to `stop` of a contiguous tensor on the host, wherever it is."""
        for part in self._parts.values():
            if (storage := part.find(tensor)) is not None:
                offset = int(tensor.storage_offset())
                return storage.read(offset + start, offset + stop)
            part.arrive()
        return tensor.view(-1)[start:stop].to("cpu", copy=True)

    def away(self) -> frozenset[Part]:
        """Return the parts that are not on the device."""
        return frozenset(part for part, moved in self._parts.items() if moved.is_away)

    def _named(self, parts: Collection[Part]) -> list[Part]:
        """List the given parts that this engine has, in the order of `Part`."""
        return [part for part in Part if part in parts and part in self._parts]


def tensors_of(
    module: torch.nn.Module, models: Iterable[Any], adams: list[Any]
) -> dict[Part, Tensors]:
    """Return, for each part of a Megatron engine, a function that lists its tensors.

    models: chunks wrapped for data parallelism, which hold the gradient buffers
    adams:  torch's optimizers; empty if nothing is trained
    """
    if not adams:
        return {Part.WEIGHTS: module.parameters}

    def optimizer() -> Iterator[Tensor]:
        """Yield moments and main weights, except main weights that are the model's own."""
        own = {_key(parameter) for parameter in module.parameters()}
        for adam in adams:
            mains = (main for group in adam.param_groups for main in group["params"])
            slots = (slot for state in adam.state.values() for slot in state.values())
            for tensor in (*mains, *slots):
                held = isinstance(tensor, Tensor) and tensor.dim() > 0
                if held and tensor.device == device.current_device() and _key(tensor) not in own:
                    yield tensor

    def gradients() -> Iterator[Tensor]:
        for model in models:
            yield from (each.grad_data for each in model.buffers + model.expert_parallel_buffers)

    return {
        Part.WEIGHTS: module.parameters,
        Part.GRADIENTS: gradients,
        Part.OPTIMIZER: optimizer,
    }
