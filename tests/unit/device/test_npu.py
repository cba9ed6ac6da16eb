"""The start of a process on NPU, against stand-ins that refuse a wrong order."""

import logging
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mindspeed_rlxf import device
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.device import npu
from tests.unit.device import npu_recorder
from tests.unit.device.npu_recorder import Recorder

NPU = DeviceKind.NPU


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Recorder:
    monkeypatch.setattr(device, "_active", None)
    monkeypatch.setattr(device, "_index", 0)
    monkeypatch.setattr(torch, "device", lambda name, number: (name, number))
    return npu_recorder.install(monkeypatch, tmp_path)


def test_device_then_adaptor_then_repatch_with_what_all_roles_have(machine):
    root = logging.getLogger()
    before = root.handlers[:], root.level
    assert device.setup(NPU, assigned="3", deadline_s=1860) == ("npu", 3)
    assert machine.calls == [
        "check_cann", "set_timeouts", "torch_npu", "set_device 3", "set_compile_mode False",
        "adaptor", "repatch",
    ]  # fmt: skip
    assert machine.arguments == {
        "use_flash_attn": True, "transformer_impl": "local", "context_parallel_size": 1,
    }  # fmt: skip
    assert (root.handlers, root.level) == before


def test_the_adaptor_parses_none_of_the_arguments_of_ray(machine, monkeypatch):
    rays = ["default_worker.py", "--node-ip-address=10.0.0.1", "--redis-password=None"]
    monkeypatch.setattr(sys, "argv", rays)
    device.setup(NPU)
    assert machine.argv == ["default_worker.py"]
    assert sys.argv is rays


def test_megatron_imported_too_early_is_refused(machine, monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core", ModuleType("megatron.core"))
    with pytest.raises(AssertionError, match=r"megatron\.core was imported before"):
        device.setup(NPU)
    assert machine.calls == []


def test_sums_of_doubles_on_the_host_survive_mindspeed(machine, monkeypatch):
    seen: list[torch.dtype] = []

    def two_ranks(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        seen.append(tensor.dtype)
        tensor.mul_(2)

    monkeypatch.setattr(dist, "all_reduce", two_ranks)
    device.setup(NPU)
    total = torch.tensor([1 + 2**-40], dtype=torch.double)  # more digits than fp32 has
    dist.all_reduce(total)
    assert total.item() == 2 + 2**-39 and seen == [torch.double]
    dist.all_reduce(single := torch.tensor([3.0]))
    assert single.item() == 6.0


def test_doubles_on_the_device_come_back_from_the_copy():
    def lost(*args: Any) -> None:
        raise AssertionError("MindSpeed's way")

    def doubled(tensor: torch.Tensor) -> None:
        assert tensor.dtype is torch.float32  # HCCL has no fp64
        tensor.mul_(2)

    total = torch.tensor([4.0], dtype=torch.double)
    on_device = SimpleNamespace(
        dtype=torch.double, device=SimpleNamespace(type="npu"), float=total.float, copy_=total.copy_
    )
    npu._reduce_fp64_in_place(lost, doubled)(on_device)
    assert total.item() == 8.0


@pytest.mark.parametrize(("variables", "message"), [
    ({}, "ASCEND_HOME_PATH or ASCEND_TOOLKIT_HOME must be CANN's folder, not ''"),
    ({"ASCEND_HOME_PATH": "/not/there"}, "not '/not/there'"),
    ({"ASCEND_TOOLKIT_HOME": "/"}, r"libascendcl\.so must be on LD_LIBRARY_PATH"),
])  # fmt: skip
def test_missing_parts_of_cann_are_named_with_their_remedy(variables, message):
    with pytest.raises(ValueError, match=f"{message}.*set_env.sh.*before `ray start`"):
        npu.check_cann(variables)


def test_the_package_keeps_torch_from_loading_torch_npu_by_itself():
    assert os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"


@pytest.mark.parametrize(("deadline", "given", "connect", "execute", "event"), [
    (1860.5, {}, "1861", "1861", "1893"),
    (30, {}, "120", "30", "1868"),  # the smallest that HCCL takes, and its default
    (10_000, {}, "7200", "10000", "10032"),  # its largest
    (1860, {"HCCL_EXEC_TIMEOUT": "3600"}, "1860", "3600", "3632"),
    (1860, {"HCCL_EXEC_TIMEOUT": "0"}, "1860", "0", "0"),
    (1860, {"HCCL_EVENT_TIMEOUT": "900"}, "1860", "899", "900"),
    (1860, {"HCCL_EVENT_TIMEOUT": "7200"}, "1860", "1860", "7200"),
    (1860, {"HCCL_EVENT_TIMEOUT": "0"}, "1860", "1860", "0"),
])  # fmt: skip
def test_hccl_waits_as_long_as_the_run_and_timeouts_of_the_user_stay(
    deadline, given, connect, execute, event
):
    npu.set_timeouts(environment := dict(given), deadline)
    assert environment == {
        "HCCL_CONNECT_TIMEOUT": connect, "HCCL_EXEC_TIMEOUT": execute, "HCCL_EVENT_TIMEOUT": event,
    }  # fmt: skip


@pytest.mark.parametrize(("given", "mib"), [(None, 400), ("50", 100), ("", 400)])
def test_a_communicator_holds_two_buffers(monkeypatch, given, mib):
    monkeypatch.delenv("HCCL_BUFFSIZE", raising=False)
    if given is not None:
        monkeypatch.setenv("HCCL_BUFFSIZE", given)
    assert device.communicator_bytes(NPU) == mib * 2**20
