"""`torch_npu.utils`: imported, and not used by any rehearsal."""

from typing import Any


def register_asd_hook(*args: Any) -> None:
    raise NotImplementedError("the stand-in has no anomaly detection; unset NPU_ASD_ENABLE")
