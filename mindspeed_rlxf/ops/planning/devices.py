"""Published figures of devices: peak rates, memory, links; each row names its source and date.

A figure without a public source is left out. Programs reach lower rates: see `SHARES`.
"""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rlxf.config.enums import DeviceKind

SIMULATOR = (
    "JiusiServe/light-llm-simulator, conf/hardware_config.py at 5df25c7 (read 2026-11-23), whose "
    "figures are those of the vendor"
)
CLOUD_MATRIX = "Huawei, arXiv:2506.12708, section 3 (2025-06)"


@dataclass(frozen=True)
class DeviceFigures:
    """Published figures of a device. GB and TFLOPS are powers of ten.

    bf16_tflops: of dense matrices
    memory_gb:   capacity of the device's memory; memory_gb_s its bandwidth
    link_gb_s:   to all devices of the host together, in one direction
    network_gb_s: to another host, in one direction
    host_gb_s:   to the memory of the host, in one direction; None = no public figure
    """

    name: str
    kind: DeviceKind
    bf16_tflops: float
    memory_gb: float
    memory_gb_s: float
    link_gb_s: float
    network_gb_s: float
    host_gb_s: float | None
    source: str


NPU, CUDA = DeviceKind.NPU, DeviceKind.CUDA
TABLE = {
    figures.name: figures
    for figures in (
        DeviceFigures("ascend-910b2", NPU, 353.8, 64, 1600, 196, 25, None, SIMULATOR),
        DeviceFigures("ascend-910b3", NPU, 294.9, 64, 1600, 196, 25, None, SIMULATOR),
        DeviceFigures("ascend-910b4", NPU, 245.7, 32, 800, 32, 25, None, SIMULATOR),
        # One die of a package of two: each die is a device.
        DeviceFigures("ascend-910_93", NPU, 376, 64, 1600, 196, 25, None, CLOUD_MATRIX),
        DeviceFigures(
            "a100-80g", CUDA, 312, 80, 2039, 300, 25, 32,
            "NVIDIA A100 80GB SXM data sheet (2021-06); DGX A100 data sheet (2020-11) for hosts",
        ),
        DeviceFigures(
            "h100", CUDA, 989, 80, 3350, 450, 50, 64,
            "NVIDIA H100 SXM data sheet (2023-04), half of the sparse rate; DGX H100 (2023-03)",
        ),
        DeviceFigures(
            "h200", CUDA, 989, 141, 4800, 450, 50, 64,
            "NVIDIA H200 SXM data sheet (2024-03), half of the sparse rate; DGX H200 (2024-03)",
        ),
    )
}  # fmt: skip
"""The network of the 910B is the 200GE port of each device (Huawei, Atlas 800T A2, 2023); that of
the 910_93 the RDMA plane of the same paper."""

USUAL = {NPU: "ascend-910b3", CUDA: "h100"}
"""Row of the table for each kind of device if `plan.device` is not set."""


@dataclass(frozen=True)
class Shares:
    """Assumed shares of the published figures that programs reach, and assumed times.

    A calibration replaces the shares of matrices and memory, and `call_s`.

    call_s:    seconds to launch a layer's kernels, added to its work
    message_s: seconds of a collective, added to its bytes
    host_gb_s: GB/s of copies to host memory, if there is no public figure
    """

    matrices: float = 0.45
    memory: float = 0.7
    links: float = 0.6
    call_s: float = 2e-4
    message_s: float = 3e-5
    host_gb_s: float = 16.0


SHARES = Shares()
