"""Strict stand-ins for torch_npu, MindSpeed and Megatron-LM: record calls and check their order.

They have only the names that `mindspeed_rlxf.device.npu` uses. Any other name raises
AttributeError; a call out of order, or a second one, raises OutOfOrder.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mindspeed_rlxf.config import packages
from mindspeed_rlxf.device import npu, npu_versions

ADAPTOR = """
import sys
import npu_recorder_of_this_test as recorder
recorder.adaptor_imported(list(sys.argv))
def repatch(arguments):
    recorder.repatched(arguments)
"""
HIDDEN = ("megatron", "mindspeed", "torch_npu")
VERSIONS = {"torch": "2.7.1+cpu", "torch_npu": "2.7.1.post8", "mindspeed": "0.12.1"}


class OutOfOrder(AssertionError):
    """A call came too early, too late or a second time."""


class Npu:
    """`torch_npu.npu` with the functions that are called before a model is built."""

    __slots__ = ("_recorder",)

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def device_count(self) -> int:
        return self._recorder.devices

    def set_device(self, index: int) -> None:
        if self._recorder.seen("adaptor"):
            raise OutOfOrder("set_device must come before the adaptor, which may claim device 0")
        if not 0 <= index < self._recorder.devices:
            raise RuntimeError(f"invalid device {index}")
        self._recorder.once(f"set_device {index}")

    def set_compile_mode(self, *, jit_compile: bool) -> None:
        self._recorder.once(f"set_compile_mode {jit_compile}")

    def current_device(self) -> int:
        chosen = [c for c in self._recorder.calls if c.startswith("set_device")]
        if not chosen:
            raise OutOfOrder("current_device must come after set_device, or it claims device 0")
        return int(chosen[0].split()[1])


class TorchNpu(MetaPathFinder, Loader):
    """Finds and loads the stand-in for torch_npu, and records its import."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == "torch_npu" else None

    def exec_module(self, module: ModuleType) -> None:
        self._recorder.torch_npu_imported()
        module.npu = torch.npu = Npu(self._recorder)  # type: ignore[attr-defined]


class Recorder(ModuleType):
    """Records what `device.npu` does.

    calls:     names of the calls, in order
    arguments: what `repatch` of the adaptor got
    argv:      sys.argv when the adaptor was imported, which the real adaptor parses
    """

    def __init__(self, devices: int) -> None:
        super().__init__("npu_recorder_of_this_test")
        self.devices, self.calls = devices, list[str]()
        self.arguments: dict[str, Any] = {}
        self.argv: list[str] = []

    def once(self, call: str) -> None:
        """Record a call. Raises OutOfOrder for a second one of the same name."""
        if self.seen(call.split()[0]):
            raise OutOfOrder(f"{call} must be called only once")
        self.calls.append(call)

    def seen(self, word: str) -> bool:
        return any(call.split()[0] == word for call in self.calls)

    def cann_checked(self) -> None:
        if not self.seen("check_cann"):  # may be called several times
            self.calls.append("check_cann")

    def timeouts_set(self) -> None:
        if self.seen("torch_npu"):
            raise OutOfOrder("HCCL's timeouts must be set before torch_npu, which may read them")
        self.once("set_timeouts")

    def torch_npu_imported(self) -> None:
        if not self.seen("check_cann"):
            raise OutOfOrder("CANN must be checked before torch_npu, which cannot load without it")
        if self.seen("adaptor"):
            raise OutOfOrder("torch_npu must be imported before the adaptor")
        self.once("torch_npu")

    def adaptor_imported(self, argv: list[str]) -> None:
        if not self.seen("set_device"):
            raise OutOfOrder("the device of the process must be set before the adaptor")
        if any(name.split(".")[0] == "megatron" for name in sys.modules if "." in name):
            raise OutOfOrder("the adaptor must be imported before Megatron")
        self.once("adaptor")
        self.argv = argv
        logging.getLogger().addHandler(logging.NullHandler())  # as the real adaptor does
        logging.getLogger().setLevel(logging.DEBUG)
        self._patch_torch()

    def repatched(self, arguments: dict[str, Any]) -> None:
        if not self.seen("adaptor"):
            raise OutOfOrder("repatch must be called after the import of the adaptor")
        self.once("repatch")
        self.arguments = arguments

    @staticmethod
    def _patch_torch() -> None:
        """Patch all_reduce as MindSpeed does: of an fp64 tensor only an fp32 copy is reduced."""
        original = dist.all_reduce

        def bypass(*args: Any, **kwargs: Any) -> Any:
            if args[0].dtype is torch.double:
                original(args[0].float(), *args[1:], **kwargs)
                return None
            return original(*args, **kwargs)

        dist.all_reduce = bypass


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, devices: int = 8) -> Recorder:
    """Make this process look like one on a host with NPUs, before anything is imported.

    Puts the stand-ins on the path, hides real packages, and sets the variables of CANN. Returns the
    recorder of all calls.
    """
    recorder = Recorder(devices)
    monkeypatch.setitem(sys.modules, recorder.__name__, recorder)
    for name in ("megatron", "mindspeed", "mindspeed.megatron_adaptor", "torch_npu"):
        if name not in sys.modules:  # so that monkeypatch removes it after the test
            monkeypatch.setitem(sys.modules, name, None)
    for name in [n for n in sys.modules if n.split(".")[0] in HIDDEN]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [TorchNpu(recorder), *sys.meta_path])
    notes = {"check_cann": recorder.cann_checked, "set_timeouts": recorder.timeouts_set}
    for name, note in notes.items():
        monkeypatch.setattr(npu, name, noted(getattr(npu, name), note))
    checkout(folder / "Megatron-LM", ["core", "training"], (0, 12, 1))
    adaptor = folder / "MindSpeed" / "mindspeed" / "megatron_adaptor.py"
    adaptor.parent.mkdir(parents=True)
    (adaptor.parent / "__init__.py").touch()
    adaptor.write_text(ADAPTOR, encoding="utf-8")
    look_in(monkeypatch, [folder / "Megatron-LM", folder / "MindSpeed"])
    (folder / "cann" / "lib64").mkdir(parents=True)
    (folder / "cann" / "lib64" / npu.LIBRARY).touch()
    monkeypatch.setenv("ASCEND_HOME_PATH", str(folder / "cann"))
    monkeypatch.delenv("ASCEND_TOOLKIT_HOME", raising=False)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder / "cann" / "lib64"))
    for name in (npu.CONNECT, npu.EXECUTE, npu.EVENT, "HCCL_BUFFSIZE", npu.VISIBLE):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores it after the test
        monkeypatch.delenv(name)
    monkeypatch.setattr(packages, "_installed", VERSIONS.get)
    monkeypatch.setattr(npu_versions, "cann_version", lambda: "9.1.0")
    monkeypatch.setattr(dist, "all_reduce", dist.all_reduce)
    monkeypatch.setattr(torch, "npu", None, raising=False)  # set when torch_npu is imported
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    return recorder


def noted(function: Callable[..., Any], note: Callable[[], None]) -> Callable[..., Any]:
    """Wrap a function so that each call first calls `note`."""

    def call(*args: Any) -> Any:
        note()
        return function(*args)

    return call


def checkout(folder: Path, parts: Sequence[str], numbers: tuple[int, int, int]) -> None:
    """Make a checkout of Megatron-LM with these packages of `megatron`.

    Importing one raises ImportError. numbers: the version, written where `core` is among the parts
    """
    for part in parts:
        (folder / "megatron" / part).mkdir(parents=True)
        (folder / "megatron" / part / "__init__.py").write_text("raise ImportError('too early')\n")
    if "core" in parts:
        lines = [f"{n} = {v}\n" for n, v in zip(packages.NUMBERS, numbers, strict=True)]
        (folder / "megatron" / "core" / "package_info.py").write_text("".join(lines))


def look_in(monkeypatch: pytest.MonkeyPatch, folders: Sequence[Path]) -> None:
    """Put the folders first on the path, and remove others that have Megatron or MindSpeed."""
    hidden = ("megatron", "mindspeed")
    kept = [p for p in sys.path if not any(Path(p, name).exists() for name in hidden)]
    monkeypatch.setattr(sys, "path", [*map(str, folders), *kept])


def smi_table(count: int) -> str:
    """Return what `npu-smi info` prints for `count` healthy chips."""
    rows = [
        f"| {i}     910B2          | OK            | 94.3     45          0    / 0        |\n"
        f"| 0                    | 0000:C{i}:00.0  | 0        0    / 0    3302 / 65536    |\n"
        for i in range(count)
    ]
    return "| npu-smi 24.1.0                   Version: 24.1.0 |\n" + "+---+\n".join(rows)
