"""A device for a process that trains nothing: selected, but no adaptor applied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.device import npu
from mindspeed_rlxf.device.facade import FACTS, resolve_kind


def load(kind: DeviceKind) -> None:
    """Import the device's library; nothing is claimed. Raises ValueError where it is missing."""
    if resolve_kind(kind) is DeviceKind.NPU:
        npu.library()  # registers torch.npu


def select(kind: DeviceKind, index: int = 0) -> torch.device:
    """The device of this process. index: among those it may see."""
    kind = resolve_kind(kind)
    if kind is DeviceKind.CPU:
        return torch.device("cpu")
    load(kind)
    _library(kind).set_device(index)
    return torch.device(FACTS[kind].torch_type, index)


def waiter(kind: DeviceKind) -> Callable[[], Any]:
    """What waits until all work given to the device is done."""
    kind = resolve_kind(kind)
    return (lambda: None) if kind is DeviceKind.CPU else _library(kind).synchronize


def _library(kind: DeviceKind) -> Any:
    return getattr(torch, FACTS[kind].torch_type)
