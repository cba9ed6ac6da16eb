"""Deterministic mode sets torch and the variables of the device's libraries."""

import os
from collections.abc import Iterator

import pytest
import torch

from mindspeed_rlxf import device
from mindspeed_rlxf.config.enums import DeviceKind

CUDA = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
NPU = {
    "HCCL_DETERMINISTIC": "true",
    "CLOSE_MATMUL_K_SHIFT": "1",
    "ATB_MATMUL_SHUFFLE_K_ENABLE": "0",
    "LCCL_DETERMINISTIC": "1",
}
NAMES = [*CUDA, *NPU]


@pytest.fixture(autouse=True)
def put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    fills = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fills


@pytest.mark.parametrize(
    ("kind", "wanted", "given", "variables"),
    [
        (DeviceKind.CPU, None, {}, {}),
        (DeviceKind.NPU, True, {}, NPU),
        (DeviceKind.CUDA, True, {}, CUDA),
        (DeviceKind.CUDA, True, {"NCCL_ALGO": "Tree"}, {**CUDA, "NCCL_ALGO": "Tree"}),
        (DeviceKind.CPU, False, {}, None),
        (DeviceKind.NPU, None, {}, None),
        (DeviceKind.CUDA, False, {}, None),
    ],
)
def test_torch_and_the_libraries_of_the_device_repeat_their_sums(
    monkeypatch: pytest.MonkeyPatch, kind: DeviceKind, wanted: bool | None, given: dict[str, str],
    variables: dict[str, str] | None,
) -> None:  # fmt: skip
    """variables: None = nothing is set"""
    monkeypatch.setattr(device, "_active", kind)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    device.set_deterministic(wanted)
    assert torch.are_deterministic_algorithms_enabled() == (variables is not None)
    assert {name: os.environ[name] for name in NAMES if name in os.environ} == (variables or {})
