"""The device facade: which device a process uses, its memory and its random streams."""

import importlib.util
import json
import os
import random
import socket
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mindspeed_rlxf import device
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.engine.role_files import make_writer
from tests.unit.device import npu_recorder

CPU, CUDA, NPU, AUTO = DeviceKind.CPU, DeviceKind.CUDA, DeviceKind.NPU, DeviceKind.AUTO


@pytest.mark.parametrize(
    ("torch_npu", "gpus", "kind"), [(True, 2, NPU), (False, 2, CUDA), (False, 0, CPU)]
)
def test_auto_prefers_npu_then_cuda_then_cpu(monkeypatch, torch_npu, gpus, kind):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: torch_npu or None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert device.resolve_kind(AUTO) is kind
    assert [device.resolve_kind(k) for k in (CPU, CUDA, NPU)] == [CPU, CUDA, NPU]
    if kind is not NPU:
        assert device.device_count(AUTO) == (gpus or None)


def test_npu_without_torch_npu_is_an_error_that_asks_to_install_it(monkeypatch, tmp_path):
    npu_recorder.install(monkeypatch, tmp_path)
    monkeypatch.setattr(device, "_active", None)
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    for use in (device.device_count, device.setup):
        with pytest.raises(ValueError, match=r"device\.kind=npu needs torch_npu.*install it"):
            use(NPU)


@pytest.mark.parametrize(("seen", "shown", "given", "index"), [
    (1, "6", {"assigned": "6"}, 0),  # Ray: each process sees its own device alone
    (4, "4,5,6,7", {"assigned": "6"}, 2),  # Ray was told to leave the node's list
    (8, "", {"assigned": "6"}, 6),  # no list: all are seen
    (2, " 4, 5 ", {"assigned": "5"}, 1),
    (4, "4,5,6,7", {"local_rank": 3}, 3),  # torchrun: all see the same
    (2, "4,5", {"local_rank": 2}, "start at most 2 processes"),  # none is shared
    (8, "4,5", {"assigned": "1"}, "CUDA_VISIBLE_DEVICES=4,5 must name the device 1 that Ray"),
    (8, "", {"assigned": "9"}, "device 9 must be one of the 8 .*no more devices"),
])  # fmt: skip
def test_a_process_chooses_its_gpu_among_the_visible_ones(monkeypatch, seen, shown, given, index):
    """index: a text = the error"""
    chosen: list[int] = []
    library = SimpleNamespace(
        device_count=lambda: seen, set_device=chosen.append, current_device=lambda: chosen[-1]
    )
    monkeypatch.setattr(torch, "cuda", library)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(device, "_active", None)
    monkeypatch.setattr(device, "_index", 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    if isinstance(index, str):
        with pytest.raises(ValueError, match=index):
            device.setup(CUDA, **given)
    else:
        assert device.setup(CUDA, **given) == torch.device("cuda", index)
        assert chosen == [index]
        with make_writer() as writer:  # of checkpoints, which begins with device 0
            writer.submit(list).result()
        assert chosen == [index, index]


def test_the_device_of_a_process_is_unknown_before_setup():
    with pytest.raises(AssertionError, match=r"device\.setup has not run"):
        device.current_device()


class Accelerator:
    """`torch.npu` or `torch.cuda` of a device of 64 GiB; any other name is an AttributeError."""

    __slots__ = ("released", "state")

    def __init__(self) -> None:
        self.released: list[str] = []
        self.state = torch.tensor([1, 2, 3], dtype=torch.uint8)

    def get_rng_state(self) -> torch.Tensor:
        return self.state.clone()

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.state = state.clone()

    def mem_get_info(self) -> tuple[int, int]:
        return 11 * 2**30, 64 * 2**30  # free, all

    def ipc_collect(self) -> None:
        self.released.append("shared")

    def empty_cache(self) -> None:
        self.released.append("cached")


@pytest.fixture(params=[CUDA, NPU])
def accelerator(monkeypatch: pytest.MonkeyPatch, request: Any) -> Accelerator:
    """A process on such a device, and the library of the other kind out of reach."""
    found = Accelerator()
    monkeypatch.setattr(torch, "npu", found if request.param is NPU else None, raising=False)
    monkeypatch.setattr(torch, "cuda", found if request.param is CUDA else None)
    monkeypatch.setattr(device, "_active", request.param)
    return found


def test_the_devices_own_memory_and_random_stream_are_used(accelerator):
    assert device.memory_total() == 64 * 2**30  # all of it
    state = json.loads(json.dumps(device.process_state()))
    assert state["device"] == "010203"
    accelerator.set_rng_state(torch.tensor([9, 9, 9], dtype=torch.uint8))
    assert device.load_process_state(state)
    assert accelerator.state.tolist() == [1, 2, 3]
    for text in ("0102", None):  # of another kind of device
        assert not device.load_process_state(state | {"device": text})


def test_memory_that_was_shared_is_released_with_the_cache(accelerator):
    device.release_cache()
    assert accelerator.released == ["shared", "cached"]


def test_the_device_has_its_number_on_the_host(accelerator, monkeypatch):
    name = device.facts(device._active).visible_devices
    monkeypatch.setattr(device, "current_device", lambda: torch.device("meta", 1))
    for visible, number in (("", "1"), ("4, 6", "6")):
        monkeypatch.setenv(name, visible)
        assert device.host_number() == number


@pytest.mark.parametrize("accelerator", [NPU], indirect=True)
def test_a_host_without_a_route_names_its_devices_by_its_own_address(accelerator, monkeypatch):
    """As vllm-ascend does: both sides must find the same name."""

    class Unreachable(socket.socket):
        def connect(self, _: object) -> None:
            raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket, "socket", Unreachable)
    monkeypatch.setattr(socket, "gethostbyname", {socket.gethostname(): "10.0.0.7"}.__getitem__)
    monkeypatch.setattr(device, "host_number", lambda: "6")
    assert device.identity() == "10.0.0.7-6"


def test_a_cpu_has_no_memory_or_random_stream_of_a_device(monkeypatch):
    monkeypatch.setattr(device, "_active", CPU)
    for name in ("npu", "cuda"):
        monkeypatch.setattr(torch, name, None, raising=False)
    device.synchronize()
    device.release_cache()
    state = device.process_state()
    assert state["device"] is None
    assert not device.load_process_state({**state, "device": "010203"})
    assert device.memory_total() == device.host_memory()


def draw() -> list[float]:
    return [
        random.random(), random.gauss(0, 1), float(np.random.random()),
        float(np.random.standard_normal()), float(torch.rand(())),
    ]  # fmt: skip


def test_random_streams_continue_from_the_saved_state():
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    draw()  # one number of each pair that gauss makes is kept for later
    state = json.loads(json.dumps(device.process_state()))
    expected = [draw(), draw()]
    draw()
    assert device.load_process_state(state)
    assert [draw(), draw()] == expected


def test_collectives_use_the_interface_of_the_nodes_address(monkeypatch):
    assert device.network_environment(CPU, "127.0.0.1")["GLOO_SOCKET_IFNAME"] == "lo"
    assert device.network_environment(CPU, "192.0.2.1") == {}  # not of this host
    monkeypatch.delenv("HCCL_SOCKET_IFNAME", raising=False)
    assert device.network_environment(NPU, "127.0.0.1")["HCCL_IF_IP"] == "127.0.0.1"
    monkeypatch.setenv("HCCL_SOCKET_IFNAME", "eth1")
    assert "HCCL_IF_IP" not in device.network_environment(NPU, "127.0.0.1")


ON_CUDA = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
ON_NPU = {
    "HCCL_DETERMINISTIC": "true", "CLOSE_MATMUL_K_SHIFT": "1", "ATB_MATMUL_SHUFFLE_K_ENABLE": "0",
    "LCCL_DETERMINISTIC": "1",
}  # fmt: skip
NAMES = [*ON_CUDA, *ON_NPU]


@pytest.fixture
def put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    fills = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fills


@pytest.mark.parametrize(("kind", "wanted", "given", "variables"), [
    (CPU, None, {}, {}), (NPU, True, {}, ON_NPU), (CUDA, True, {}, ON_CUDA),
    (CUDA, True, {"NCCL_ALGO": "Tree"}, {**ON_CUDA, "NCCL_ALGO": "Tree"}), (CPU, False, {}, None),
    (NPU, None, {}, None), (CUDA, False, {}, None),
])  # fmt: skip
def test_torch_and_the_libraries_of_the_device_repeat_their_sums(
    put_back, monkeypatch, kind, wanted, given, variables
):
    """variables: None = nothing is set"""
    monkeypatch.setattr(device, "_active", kind)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    device.set_deterministic(wanted)
    assert torch.are_deterministic_algorithms_enabled() == (variables is not None)
    assert {name: os.environ[name] for name in NAMES if name in os.environ} == (variables or {})
