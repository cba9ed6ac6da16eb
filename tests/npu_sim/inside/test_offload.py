"""Offloading on the simulated device: freed memory, and copies that end late."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mindspeed_rlxf.device import copies
from mindspeed_rlxf.engine import offload
from mindspeed_rlxf.engine.offload import Offload
from mindspeed_rlxf.engine.train_engine import MemoryKind

KIB = 1024
LAST = 4 * KIB  # numbers of the last chunk


@pytest.fixture
def moved(device: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[torch.Tensor, Offload]]:
    """Weights of 64 KiB that a buffer of the host holds in four chunks, and moments of 256 KiB."""
    monkeypatch.setattr(offload, "CHUNK_BYTES", 16 * KIB)
    device.set_delayed(True)
    weights = torch.nn.Parameter(torch.arange(16.0 * KIB, device="npu").view(128, 128))
    moments = torch.full((64 * KIB,), 3.0, device="npu")
    tensors = {MemoryKind.WEIGHTS: lambda: [weights], MemoryKind.OPTIMIZER: lambda: [moments]}
    yield weights, Offload(tensors, MemoryKind)  # type: ignore[arg-type]


def numbers(weights: torch.Tensor) -> list[float]:
    return weights.detach().view(-1).cpu().tolist()


def test_memory_is_gone_and_comes_back(device, moved):
    weights, offload = moved
    before = device.memory(0)[0]
    offload.offload(MemoryKind)
    assert before - device.memory(0)[0] == 5 * 64 * KIB
    offload.onload([MemoryKind.WEIGHTS])
    offload.await_copies(MemoryKind.WEIGHTS)
    assert before - device.memory(0)[0] == 4 * 64 * KIB
    assert numbers(weights) == list(range(16 * KIB))


def test_onloaded_numbers_are_complete_only_after_the_wait(device, moved):
    weights, offload = moved
    offload.offload(MemoryKind)
    assert device.pending_copies() == 0  # storages are freed after the copies
    offload.onload([MemoryKind.WEIGHTS])
    # Nobody has waited; the device ends a copy at the latest when the next of its stream begins.
    assert (weights + 0).view(-1)[-LAST:].isnan().all()
    offload.await_copies(MemoryKind.WEIGHTS)
    assert numbers(weights + 0) == list(range(16 * KIB))


def test_a_read_from_the_host_has_its_numbers(device, moved):
    weights, offload = moved
    offload.offload(MemoryKind)
    assert offload.read(weights.detach(), 5000, 9000).tolist() == list(range(5000, 9000))
    offload.onload(MemoryKind)
    assert offload.read(weights.detach(), 5000, 9000).tolist() == list(range(5000, 9000))


@pytest.mark.parametrize("wait", ["offload", "onload"])
def test_a_wait_that_is_left_out_spoils_the_numbers(device, moved, monkeypatch, wait):
    weights, offload = moved
    if wait == "offload":
        monkeypatch.setattr(copies.CopyStream, "finish", lambda self: None)
        offload.offload(MemoryKind)
        assert offload.read(weights.detach(), 0, 10).isnan().all()
        return
    monkeypatch.setattr(copies.CopyStream, "join", lambda self, event: None)
    offload.offload(MemoryKind)
    offload.onload([MemoryKind.WEIGHTS])
    offload.await_copies(MemoryKind.WEIGHTS)
    assert (weights + 0).view(-1)[-LAST:].isnan().all()


def test_a_thousand_moves_leak_nothing(device, moved):
    weights, offload = moved
    before = device.memory(0)[0]
    for _ in range(1000):
        offload.mark_changed(*MemoryKind)
        offload.offload(MemoryKind)
        offload.onload(MemoryKind)
    offload.await_copies(*MemoryKind)
    assert device.memory(0)[0] == before
    assert numbers(weights) == list(range(16 * KIB))
    torch.npu.synchronize()
    assert device.pending_copies() == 0


def test_a_device_that_is_full_leaves_the_copies(device, moved):
    weights, offload = moved
    offload.offload(MemoryKind)
    devices, limit = device.device_count(), device.memory(0)[2]
    device.set_devices(devices, device.memory(0)[0] + 128 * KIB)
    try:
        with pytest.raises(RuntimeError, match="NPU out of memory"):
            offload.onload(MemoryKind)
        assert [p for p, held in offload._memory.items() if held.is_away] == [MemoryKind.OPTIMIZER]
    finally:
        device.set_devices(devices, limit)
    offload.await_copies(MemoryKind.WEIGHTS)
    assert numbers(weights) == list(range(16 * KIB))
