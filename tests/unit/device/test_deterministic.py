"""What makes a device repeat itself, and when it is asked to."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from mindspeed_rlxf import device
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.device import facade

CUDA = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
NPU = {
    "HCCL_DETERMINISTIC": "true",
    "CLOSE_MATMUL_K_SHIFT": "1",
    "ATB_MATMUL_SHUFFLE_K_ENABLE": "0",
}
LCCL = {"LCCL_DETERMINISTIC": "1"}
MODE = "HCCL_OP_EXPANSION_MODE"
NAMES = [*CUDA, *NPU, *LCCL]


@pytest.fixture(autouse=True)
def put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*NAMES, MODE):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    fills = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fills


@pytest.mark.parametrize(
    ("kind", "wanted", "variables"),
    [
        (DeviceKind.CPU, None, {}),
        (DeviceKind.NPU, True, NPU),
        (DeviceKind.CUDA, True, CUDA),
        (DeviceKind.CPU, False, None),
        (DeviceKind.NPU, None, None),
        (DeviceKind.CUDA, False, None),
    ],
)
def test_torch_and_the_libraries_of_the_device_are_told(
    monkeypatch: pytest.MonkeyPatch,
    kind: DeviceKind,
    wanted: bool | None,
    variables: dict[str, str] | None,
) -> None:
    monkeypatch.setattr(facade, "_active", kind)
    device.set_deterministic(wanted)
    assert torch.are_deterministic_algorithms_enabled() == (variables is not None)
    assert set_now() == (variables or {})


def set_now() -> dict[str, str]:
    return {name: os.environ[name] for name in NAMES if name in os.environ}


@pytest.mark.parametrize(("mode", "more"), [("AIV", LCCL), ("HOST", {}), ("AI_CPU", {})])
def test_hccl_on_the_vector_cores_repeats_itself_too(
    monkeypatch: pytest.MonkeyPatch, mode: str, more: dict[str, str]
) -> None:
    monkeypatch.setattr(facade, "_active", DeviceKind.NPU)
    monkeypatch.setenv(MODE, mode)
    device.set_deterministic(True)
    assert set_now() == {**NPU, **more}


def test_a_variable_that_is_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facade, "_active", DeviceKind.CUDA)
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    device.set_deterministic(True)
    assert os.environ["NCCL_ALGO"] == "Tree"
