"""The start of a process on NPU, against stand-ins that refuse a wrong order."""

import importlib
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
from mindspeed_rlxf.config.problems import Problem
from mindspeed_rlxf.device import npu, visible
from tests.unit.device import npu_recorder
from tests.unit.device.npu_recorder import Recorder

NPU = DeviceKind.NPU


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Recorder:
    monkeypatch.setattr(device, "_active", None)
    monkeypatch.setattr(torch, "device", lambda name, number: (name, number))
    return npu_recorder.install(monkeypatch, tmp_path)


def test_device_then_adaptor_then_repatch(machine: Recorder) -> None:
    assert device.setup(NPU, assigned="3", deadline_s=1860) == ("npu", 3)
    assert machine.calls == [
        "check_cann", "set_timeouts", "torch_npu", "set_device 3", "set_compile_mode False",
        "adaptor", "repatch",
    ]  # fmt: skip


def test_the_adaptor_parses_none_of_the_arguments_of_ray(
    machine: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    rays = ["default_worker.py", "--node-ip-address=10.0.0.1", "--redis-password=None"]
    monkeypatch.setattr(sys, "argv", rays)
    device.setup(NPU)
    assert machine.argv == ["default_worker.py"]
    assert sys.argv is rays


def test_the_adaptor_gets_flash_attention_and_no_argument_that_differs_between_roles(
    machine: Recorder,
) -> None:
    device.setup(NPU)
    assert machine.arguments["use_flash_attn"] is True
    sizes = {name for name in machine.arguments if "parallel" in name or name.startswith("num_")}
    assert sizes == {"context_parallel_size"}  # 1 for every role
    machine.arguments["use_flash_attn"] = False  # the adaptor's copy is its own
    assert npu.ARGUMENTS["use_flash_attn"] is True


def test_megatron_imported_too_early_is_refused(
    machine: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core", ModuleType("megatron.core"))
    with pytest.raises(AssertionError, match=r"megatron\.core was imported before"):
        device.setup(NPU)
    assert machine.calls == []


def test_the_empty_namespace_that_a_look_at_versions_imports_is_no_megatron(
    machine: Recorder,
) -> None:
    assert importlib.util.find_spec("megatron.core") and "megatron" in sys.modules
    device.setup(NPU)
    assert "adaptor" in machine.calls


def test_handlers_and_level_of_the_root_logger_stay(machine: Recorder) -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    device.setup(NPU)
    assert (root.handlers, root.level) == before


def test_a_failed_start_leaves_the_process_without_a_device(machine: Recorder) -> None:
    with pytest.raises(ValueError, match="device 8 must be one of the 8"):
        device.setup(NPU, local_rank=8)
    with pytest.raises(AssertionError, match=r"device\.setup has not run"):
        device.current_device()


# Sums


def test_sums_of_doubles_on_the_host_survive_mindspeed(
    machine: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_doubles_on_the_device_come_back_from_the_copy() -> None:
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


# Devices


@pytest.mark.parametrize(
    ("shown", "assigned", "seen", "index"),
    [
        ("5", "5", 1, 0),  # Ray showed the process its device alone
        ("4,5,6,7", "6", 4, 2),  # Ray was told not to: the node's own list, host numbers
        ("", "6", 8, 6),  # no list: all are seen
        (" 4, 5 ", "5", 2, 1),
    ],
)
def test_the_number_of_a_device_on_the_host_becomes_that_in_the_process(
    monkeypatch: pytest.MonkeyPatch, shown: str, assigned: str, seen: int, index: int
) -> None:
    monkeypatch.setenv(npu.VISIBLE, shown)
    assert visible.index_within(assigned, npu.VISIBLE, seen) == index


@pytest.mark.parametrize(
    ("shown", "assigned", "message"),
    [
        ("4,5", "1", r"ASCEND_RT_VISIBLE_DEVICES=4,5 must name the device 1 that Ray"),
        ("", "9", r"device 9 must be one of the 8 .*no more devices"),
    ],
)
def test_a_device_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, shown: str, assigned: str, message: str
) -> None:
    monkeypatch.setenv(npu.VISIBLE, shown)
    with pytest.raises(ValueError, match=message):
        visible.index_within(assigned, npu.VISIBLE, 8)


# CANN


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "ASCEND_HOME_PATH or ASCEND_TOOLKIT_HOME, neither is set"),
        ({"ASCEND_HOME_PATH": "/not/there"}, "/not/there is not there"),
        ({"ASCEND_TOOLKIT_HOME": "/"}, r"libascendcl\.so must be on LD_LIBRARY_PATH"),
    ],
)
def test_missing_parts_of_cann_are_named_with_their_remedy(
    variables: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=f"{message}.*set_env.sh.*before `ray start`"):
        npu.check_cann(variables)


def test_cann_is_asked_before_torch_npu_is_touched(
    machine: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ASCEND_HOME_PATH")
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    for use in (lambda: device.device_count(NPU), lambda: device.setup(NPU)):
        with pytest.raises(ValueError, match=r"set_env\.sh"):
            use()


def test_the_package_keeps_torch_from_loading_torch_npu_by_itself() -> None:
    assert os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"


# HCCL


def test_hccl_waits_at_least_as_long_as_the_run() -> None:
    environment: dict[str, str] = {}
    npu.set_timeouts(environment, 1860.5)
    assert environment == {
        "HCCL_CONNECT_TIMEOUT": "1861", "HCCL_EXEC_TIMEOUT": "1861", "HCCL_EVENT_TIMEOUT": "1893",
    }  # fmt: skip
    short: dict[str, str] = {}
    npu.set_timeouts(short, 30)
    assert short["HCCL_CONNECT_TIMEOUT"] == "120"  # its smallest value
    assert short["HCCL_EVENT_TIMEOUT"] == "1868"  # its default
    npu.set_timeouts(long := {}, 10_000)
    assert long["HCCL_CONNECT_TIMEOUT"] == "7200"  # its largest


@pytest.mark.parametrize(
    ("given", "others", "warning"),
    [
        ({"HCCL_EXEC_TIMEOUT": "600"}, {"HCCL_EVENT_TIMEOUT": "1868"},
         "HCCL_EXEC_TIMEOUT=600 is less than the 1860 s"),
        ({"HCCL_EXEC_TIMEOUT": "3600"}, {"HCCL_EVENT_TIMEOUT": "3632"}, None),
        ({"HCCL_EXEC_TIMEOUT": "0"}, {"HCCL_EVENT_TIMEOUT": "0"}, None),
        ({"HCCL_EVENT_TIMEOUT": "900"}, {"HCCL_EXEC_TIMEOUT": "899"},
         "HCCL_EVENT_TIMEOUT=900 is less than the 1861 s"),
        ({"HCCL_EVENT_TIMEOUT": "7200"}, {"HCCL_EXEC_TIMEOUT": "1860"}, None),
        ({"HCCL_EVENT_TIMEOUT": "0"}, {"HCCL_EXEC_TIMEOUT": "1860"}, None),
    ],
)  # fmt: skip
def test_timeouts_of_the_user_stay_and_the_other_one_follows(
    caplog: pytest.LogCaptureFixture, given: dict[str, str], others: dict[str, str],
    warning: str | None,
) -> None:  # fmt: skip
    environment = {"HCCL_CONNECT_TIMEOUT": "7200", **given}
    npu.set_timeouts(environment, 1860)
    assert environment == {"HCCL_CONNECT_TIMEOUT": "7200", **given, **others}
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (warning is not None) and all(warning in text for text in said if warning)


@pytest.mark.parametrize(
    ("execute", "event", "remedy"),
    [
        ("1836", "1868", None),
        ("1836", "1836", "set HCCL_EVENT_TIMEOUT=1868"),
        ("7200", "1868", "set HCCL_EVENT_TIMEOUT=7232"),
        ("0", "1868", "set HCCL_EVENT_TIMEOUT=0"),
        ("0", "0", None),
        ("7200", "0", None),
        ("7200", None, None),
        (None, "60", None),
        ("7200", "soon", None),  # HCCL reports it
    ],
)
def test_an_event_timeout_must_exceed_that_of_execution(
    execute: str | None, event: str | None, remedy: str | None
) -> None:
    given = {"HCCL_EXEC_TIMEOUT": execute, "HCCL_EVENT_TIMEOUT": event}
    environment = {name: value for name, value in given.items() if value is not None}
    problems = device.environment_problems(NPU, environment)
    assert device.environment_problems(DeviceKind.CPU, environment) == []
    assert len(problems) == (remedy is not None)
    if remedy is not None:
        rule = f"HCCL_EVENT_TIMEOUT={event} must be greater than HCCL_EXEC_TIMEOUT={execute}"
        line = str(Problem(*problems[0]))
        assert line.startswith(rule) and remedy in line


@pytest.mark.parametrize(("given", "mib"), [(None, 400), ("50", 100), ("", 400)])
def test_a_communicator_holds_two_buffers(
    monkeypatch: pytest.MonkeyPatch, given: str | None, mib: int
) -> None:
    monkeypatch.delenv("HCCL_BUFFSIZE", raising=False)
    if given is not None:
        monkeypatch.setenv("HCCL_BUFFSIZE", given)
    assert device.communicator_bytes(NPU) == mib * 2**20
