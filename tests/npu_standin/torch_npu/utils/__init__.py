"""`torch_npu.utils`: imported, and used by nothing that is rehearsed."""

from typing import Any


def register_asd_hook(*args: Any) -> None:
    raise NotImplementedError("the stand-in has no anomaly detection; unset NPU_ASD_ENABLE")
