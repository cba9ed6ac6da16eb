"""`torch_npu.utils`: imported, and never called."""

from typing import Any


def register_asd_hook(*args: Any) -> None:
    raise NotImplementedError("no anomaly detection here; unset NPU_ASD_ENABLE")
