"""Find the memory of devices and hosts, and the free disk; claims no device, writes no file."""

import contextlib
import shutil
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import TypeVar

from mindspeed_rlxf import device
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.rules.this_host import GIB, joined_address
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.ops.sizes import existing_folder

T = TypeVar("T")

_answers: dict[Hashable, object] | None = None


@contextlib.contextmanager
def asked_once() -> Iterator[None]:
    """In the block, run the driver's tool and look for a cluster once each, not in every call.

    The search for remedies asks hundreds of times, and the tool takes seconds.
    """
    global _answers
    before, _answers = _answers, {}
    try:
        yield
    finally:
        _answers = before


def _ask(question: Hashable, find: Callable[[], T]) -> T:
    if _answers is None:
        return find()
    if question not in _answers:
        _answers[question] = find()
    return _answers[question]  # type: ignore[return-value]


def is_joined(config: RunConfig) -> bool:
    """Return whether the run joins a Ray cluster, whose hosts cannot be looked at here."""
    if config.runtime.kind != "ray":
        return False
    return _ask(("cluster", config.runtime.address), lambda: joined_address(config)) is not None


def on_cpu(config: RunConfig) -> bool:
    """Whether the device is a CPU, so that roles use the memory of the hosts."""
    return device.resolve_kind(config.device.kind) is DeviceKind.CPU


def device_memory(config: RunConfig) -> int | None:
    """Return `device.memory_gib` in bytes if set, else the memory of this host's smallest device.

    None = unknown, as without `device.memory_gib` on a joined cluster or on CPU. Without the key it
    runs the driver's tool, which may take seconds; see `asked_once`.
    """
    if config.device.memory_gib is not None:
        return int(config.device.memory_gib * GIB)
    if is_joined(config):
        return None
    kind = config.device.kind
    return _ask(("memory", kind), lambda: device.smallest_device_memory(kind))


def rollout_memory(config: RunConfig) -> int | None:
    """Return the bytes of memory that a generating process may use; None = unknown.

    On CPU, unless `device.memory_gib` is set, the generating ranks share the host's memory equally
    (None on a joined cluster). Otherwise it is the memory of a device.
    """
    if config.device.memory_gib is not None or not on_cpu(config):
        return device_memory(config)
    return None if is_joined(config) else device.host_memory() // config.rollout_layout.world_size


def host_memory(config: RunConfig) -> int | None:
    """Return the bytes of the host that all workers run on; None if the run joins a cluster."""
    return None if is_joined(config) else device.host_memory()


def free_disk(folder: Path) -> int:
    """Return the free bytes of the disk that `folder` is on, or will be."""
    return shutil.disk_usage(existing_folder(folder)).free
