"""One gloo device for all groups of a process.

torch gives each group a device of its own, whose thread looks after its sockets and wakes a hundred
times a second. Megatron makes a hundred groups for a role: ranks that wait keep a host busy then.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_devices: list[Any] = []


def apply() -> None:
    """Groups that are made from now on share the process's devices."""
    gloo: Any = dist.ProcessGroupGloo
    make = gloo.__init__
    if getattr(make, "shares_devices", False):
        return

    def init(self: Any, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        options = gloo._Options()
        options._timeout, options._devices = timeout, _shared()
        options._threads = 2 * len(options._devices)  # as torch has it
        make(self, store, rank, size, options)

    init.shares_devices = True  # type: ignore[attr-defined]
    gloo.__init__ = init


def _shared() -> list[Any]:
    """The devices that torch would choose."""
    if not _devices:
        gloo: Any = dist.ProcessGroupGloo
        names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        made = [gloo.create_device(interface=name) for name in names]
        _devices.extend(made or [gloo.create_default_device()])
    return _devices
