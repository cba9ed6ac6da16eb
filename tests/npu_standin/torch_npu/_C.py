"""`torch_npu._C`: options of HCCL groups, which gloo is not told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class Options:
    hccl_config: dict[str, Any] = {}  # noqa: RUF012 (MindSpeed asks the class whether it has one)

    def __init__(self) -> None:
        self.hccl_config = {}


_distributed_c10d = SimpleNamespace(ProcessGroupHCCL=SimpleNamespace(Options=Options))
