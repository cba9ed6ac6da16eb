"""Move the memory of engines between device and host memory.

Storages are moved, not tensors. A storage is freed by resizing it to 0 bytes, and later resized
back. So all tensors that view it stay valid: parameters, Megatron's buffer views, gradients, and
weights shared with a rollout.
"""

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from mindspeed_rlxf import device
from mindspeed_rlxf.device.copies import CopyStream, host_buffer
from mindspeed_rlxf.engine.train_engine import MemoryKind

CHUNK_BYTES = 2**28  # largest allocation of host memory; torch rounds up to a power of two
ALIGNMENT = 512  # bytes

Tensors = Callable[[], Iterable[Tensor]]


@dataclass
class _Storage:
    """A device storage, and the host memory it is copied to."""

    tensor: Tensor  # any tensor that views the storage
    num_bytes: int
    pieces: list[Tensor] = field(default_factory=list)  # host memory, in order, [bytes] uint8

    def resize(self, num_bytes: int) -> None:
        """Free (0) or allocate the storage on the device; its content is lost."""
        self.tensor.untyped_storage().resize_(num_bytes)

    def on_device(self) -> Tensor:
        """Return the whole storage as a tensor [elements]."""
        return self.tensor.as_strided((self.num_bytes // self.tensor.itemsize,), (1,), 0)

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (device range, its host memory)."""
        hosts = [piece.view(self.tensor.dtype) for piece in self.pieces]
        devices = self.on_device().split([host.numel() for host in hosts])
        yield from zip(devices, hosts, strict=True)

    def read(self, start: int, stop: int) -> Tensor:
        """Return a copy of host elements `start` to `stop`, [stop - start]."""
        copied = torch.empty(stop - start, dtype=self.tensor.dtype)
        offset = 0  # of the piece in the storage
        for piece in self.pieces:
            host = piece.view(self.tensor.dtype)
            begin = max(start, offset)
            end = min(stop, offset + host.numel())
            if begin < end:
                copied[begin - start : end - start] = host[begin - offset : end - offset]
            offset += host.numel()
        return copied


class _HostMemory:
    """Host memory for storages, allocated in chunks that live as long as this object."""

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []
        self._num_free = 0  # bytes of the last chunk

    def assign(self, storages: list[_Storage]) -> None:
        """Append host memory, as many bytes as each storage has, to its `pieces`.

        Allocates chunks as needed. A storage gets several pieces if a chunk is used up before its
        end.
        """
        num_needed = sum(_round_to_alignment(storage.num_bytes) for storage in storages)
        num_to_allocate = num_needed - self._num_free
        for storage in storages:
            num_missing = storage.num_bytes
            while num_missing > 0:
                if self._num_free == 0:
                    self._num_free = min(num_to_allocate, CHUNK_BYTES)
                    num_to_allocate -= self._num_free
                    self._chunks.append(host_buffer(self._num_free))
                start = len(self._chunks[-1]) - self._num_free
                size = min(num_missing, self._num_free)
                storage.pieces.append(self._chunks[-1][start : start + size])
                self._num_free -= min(_round_to_alignment(size), self._num_free)
                num_missing -= size


def _round_to_alignment(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class _MovableMemory:
    """Moves the storages of one kind of memory of an engine.

    Memory that is not copied is only freed, and is zeros after `onload`. An optimizer's first step
    makes some tensors, so `tensors` returns the current ones.
    """

    def __init__(self, tensors: Tensors, copies: CopyStream, is_copied: bool) -> None:
        self._tensors = tensors
        self._copies = copies
        self._is_copied = is_copied
        self._host = _HostMemory()
        self.storages: dict[int, _Storage] = {}
        self._arrival: Any = None  # event of the last copies to the device
        self.is_away = False
        self.is_changed = True  # the host copy is out of date

    def offload(self) -> None:
        """Copy the memory to the host if it has changed, wait, and free it on the device.

        Without `is_copied` it is only freed. Does nothing if it is not on the device.
        """
        if self.is_away:
            return
        self._add_new_storages()
        self._copies.finish()  # copies to the device may still run
        if self._is_copied and self.is_changed:
            with self._copies.copying():
                for storage in self.storages.values():
                    for on_device, host in storage.pairs():
                        host.copy_(on_device, non_blocking=True)
            self._copies.finish()
        self._free()
        self.is_away = True
        self.is_changed = False

    def onload(self) -> None:
        """Allocate the storages on the device and start copying them back.

        Does nothing if they are there. Without `is_copied` they become zeros. `await_copies` waits
        for the copies. Raises RuntimeError if the device lacks memory; it is then still on
        the host.
        """
        if not self.is_away:
            return
        try:
            for storage in self.storages.values():
                storage.resize(storage.num_bytes)
        except RuntimeError:  # out of memory: the copies on the host stay valid
            self._free()
            raise
        if self._is_copied:
            with self._copies.copying():
                for storage in self.storages.values():
                    for on_device, host in storage.pairs():
                        on_device.copy_(host, non_blocking=True)
            self._arrival = self._copies.mark()
        else:
            for storage in self.storages.values():
                storage.on_device().zero_()
        self.is_away = False

    def await_copies(self) -> None:
        """Make device work launched from now on wait for the last `onload`'s copies.

        Does nothing if there were none, or in a second call for the same copies.
        """
        if self._arrival is not None:
            self._copies.join(self._arrival)
            self._arrival = None

    def _add_new_storages(self) -> None:
        """Add storages for tensors made since the last time; skip empty storages."""
        new: dict[int, _Storage] = {}
        for tensor in self._tensors():
            storage = tensor.untyped_storage()
            if _key(tensor) not in self.storages and storage.nbytes():
                new[_key(tensor)] = _Storage(tensor.detach(), storage.nbytes())
        if self._is_copied:
            self._host.assign(list(new.values()))
            self.is_changed = self.is_changed or bool(new)
        self.storages |= new

    def _free(self) -> None:
        for storage in self.storages.values():
            storage.resize(0)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Offload:
    """Moves one engine's memory between device and host.

    Attributes:
        movable: Kinds that move to the host when another engine in the process needs the device.
    """

    def __init__(
        self, tensors: Mapping[MemoryKind, Tensors], movable: Collection[MemoryKind]
    ) -> None:
        copies = CopyStream()
        self.movable = frozenset(movable) & frozenset(tensors)
        self._memory = {
            kind: _MovableMemory(list_tensors, copies, is_copied=kind is not MemoryKind.GRADIENTS)
            for kind, list_tensors in tensors.items()
        }

    def offload(self, kinds: Collection[MemoryKind]) -> None:
        """Copy these kinds of memory to the host where changed, and free them on the device.

        Gradients are not copied. Skips kinds the engine lacks or that are on the host already.
        """
        for moved in self._of_kinds(kinds):
            moved.offload()

    def onload(self, kinds: Collection[MemoryKind]) -> None:
        """Allocate these kinds on the device and start copying them back; gradients become zeros.

        Skips kinds the engine lacks or that are there. `await_copies` waits for the copies.
        """
        for moved in self._of_kinds(kinds):
            moved.onload()

    def await_copies(self, *kinds: MemoryKind) -> None:
        """Make device work launched from now on wait for these kinds to arrive."""
        for moved in self._of_kinds(kinds):
            moved.await_copies()

    def mark_changed(self, *kinds: MemoryKind) -> None:
        """Mark these kinds' host copies as out of date; skip kinds the engine lacks."""
        for moved in self._of_kinds(kinds):
            moved.is_changed = True

    def read(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """Return a host copy of elements `start` to `stop` in a contiguous tensor.

        The tensor may be on the device or on the host; it stays there. Device work launched later
        waits for copies still on their way.
        """
        for moved in self._memory.values():
            storage = moved.storages.get(_key(tensor))
            if moved.is_away and storage is not None:
                offset = int(tensor.storage_offset())
                return storage.read(offset + start, offset + stop)
            moved.await_copies()
        return tensor.view(-1)[start:stop].to("cpu", copy=True)

    def _of_kinds(self, kinds: Collection[MemoryKind]) -> list[_MovableMemory]:
        return [self._memory[kind] for kind in MemoryKind if kind in kinds and kind in self._memory]


def tensors_of(
    module: torch.nn.Module, models: Iterable[Any], adams: list[Any]
) -> dict[MemoryKind, Tensors]:
    """Return, for each kind of a Megatron engine's memory, a function that lists its tensors now.

    Args:
        module: Module with the weights.
        models: Chunks wrapped for data parallelism, which have the gradient buffers.
        adams: Torch optimizers, which have moments and main weights beside the model's own. Without
            any, nothing is trained and there are only weights.
    """
    if not adams:
        return {MemoryKind.WEIGHTS: module.parameters}

    def optimizer() -> Iterator[Tensor]:
        """Yield moments and main weights on the device, except those that are model weights."""
        weights = {_key(parameter) for parameter in module.parameters()}
        for adam in adams:
            tensors: list[Any] = []
            for group in adam.param_groups:
                tensors += group["params"]
            for state in adam.state.values():
                tensors += state.values()
            for tensor in tensors:
                if not isinstance(tensor, Tensor) or tensor.dim() == 0:
                    continue
                if tensor.device == device.current_device() and _key(tensor) not in weights:
                    yield tensor

    def gradients() -> Iterator[Tensor]:
        for model in models:
            for buffer in model.buffers + model.expert_parallel_buffers:
                yield buffer.grad_data

    return {
        MemoryKind.WEIGHTS: module.parameters,
        MemoryKind.GRADIENTS: gradients,
        MemoryKind.OPTIMIZER: optimizer,
    }


_known: weakref.WeakSet[Offload] = weakref.WeakSet()
_holds: list[tuple[Offload, frozenset[MemoryKind]]] = []
"""Engines and their kinds of memory that open `holding` blocks keep on the device."""


def register(offload: Offload) -> None:
    """Add an engine whose memory may move, until the engine is collected."""
    _known.add(offload)


class Guest(Protocol):
    """Something beside the engines that is on the device, such as a generating model."""

    def leave_device(self) -> None:
        """Free its device memory."""


guests: weakref.WeakSet[Guest] = weakref.WeakSet()
"""Those that stay until `holding` next makes room."""


@contextlib.contextmanager
def holding(
    *needs: tuple[Offload, Collection[MemoryKind]], later: Collection[MemoryKind] = ()
) -> Iterator[None]:
    """Keep kinds on the device inside the block, beside the kinds held by enclosing blocks.

    First sends the guests away, and moves all other movable kinds of all engines to the host, even
    if `needs` is empty, to make room for something else. Parts stay on the device after the block.

    Args:
        needs: (engine's offload, its kinds).
        later: Parts whose copies may still run in the block; call `Offload.await_copies` before
            use.
    """
    for guest in list(guests):
        guests.discard(guest)
        guest.leave_device()
    holds = [(offload, frozenset(kinds)) for offload, kinds in needs]
    _holds.extend(holds)
    try:
        for offload in list(_known):  # make room
            movable = set(offload.movable)
            for holder, kinds in _holds:
                if holder is offload:
                    movable -= kinds
            offload.offload(movable)
        for offload, kinds in holds:
            offload.onload(kinds)
        for offload, kinds in holds:
            offload.await_copies(*(kinds - frozenset(later)))
        yield
    finally:
        for hold in holds:
            _holds.remove(hold)


@contextlib.contextmanager
def room_for_other_processes() -> Iterator[None]:
    """Move all movable kinds to the host as `holding()` does, and release their device memory.

    Otherwise torch keeps what they leave for this process.
    """
    with holding():
        device.release_cache()
        yield
