"""`torch_npu._C`: options of HCCL groups, which are not passed on to gloo."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class Options:
    hccl_config: dict[str, Any] = {}  # noqa: RUF012 (MindSpeed looks for it on the class)

    def __init__(self) -> None:
        self.hccl_config = {}


_distributed_c10d = SimpleNamespace(ProcessGroupHCCL=SimpleNamespace(Options=Options))
