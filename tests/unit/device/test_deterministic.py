"""What makes a device repeat itself, and when it is asked to."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from mindspeed_rlxf import device
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.device import facade


@pytest.fixture(autouse=True)
def put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for names in facade.DETERMINISTIC.values():
        for name in names:
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
        (DeviceKind.NPU, True, {"HCCL_DETERMINISTIC": "true"}),
        (DeviceKind.CUDA, True, {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}),
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
    names = {name for found in facade.DETERMINISTIC.values() for name in found}
    assert {name: os.environ[name] for name in names if name in os.environ} == (variables or {})


def test_a_variable_that_is_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facade, "_active", DeviceKind.CUDA)
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    device.set_deterministic(True)
    assert os.environ["NCCL_ALGO"] == "Tree"
