"""The names that libraries give devices are mapped to the peak of their data sheet."""

from __future__ import annotations

import pytest

from mindspeed_rlxf.trainer.metrics import find_peak


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("Ascend910B3", 294.9),
        ("Ascend910_9392", 376),
        ("NVIDIA H100 PCIe", None),  # clocked lower
        ("NVIDIA H100 NVL", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("", None),
    ],
)
def test_a_device_is_found_by_its_name(name: str, tflops: float | None) -> None:
    assert find_peak(name) == (None if tflops is None else pytest.approx(tflops * 1e12))
