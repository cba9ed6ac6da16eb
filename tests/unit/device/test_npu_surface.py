"""Real torch_npu wheels and MindSpeed sources have every name that our code uses.

RLXF_NPU_PACKAGES names wheels and source folders, separated as in PATH; without it only the check
itself is tested.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from tests.unit.device import npu_surface

NAMED = [Path(p) for p in os.environ.get("RLXF_NPU_PACKAGES", "").split(os.pathsep) if p]
INIT = """
from .memory import *
from .config import set_compile_mode
def device_count(): ...
def set_device(device): ...
def current_device(): ...
def synchronize(): ...
def get_device_name(): ...
def get_rng_state(): ...
def set_rng_state(state): ...
"""
MEMORY = """
def mem_get_info(): ...
def max_memory_allocated(): ...
def reset_peak_memory_stats(): ...
"""
OLDER, NEWER = "torch_npu/__init__.py", "torch_npu/_init/registry/distributed.py"
NONE = [pytest.param(None, marks=pytest.mark.skip(reason="RLXF_NPU_PACKAGES names no package"))]
CONFIG = "def set_compile_mode(jit_compile=False): ...\n"


@pytest.mark.parametrize("package", NAMED or NONE, ids=str)
def test_real_packages_have_every_name_that_is_used(package: Path) -> None:
    assert npu_surface.problems(package) == []


def wheel(
    file: Path, init: str = INIT, config: str = CONFIG, hccl: str = OLDER, backend: str = "hccl"
) -> npu_surface.Read:
    """hccl: module that registers the backend"""
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("torch_npu/npu/__init__.py", init)
        archive.writestr("torch_npu/npu/memory.py", MEMORY)
        archive.writestr("torch_npu/npu/npu_config.py", config)
        archive.writestr("torch_npu/contrib/transfer_to_npu.py", "_init()")
        archive.writestr(hccl, f'Backend.register_backend("{backend}", lambda options: None)\n')
    return npu_surface.wheel(file)


def test_the_names_in_use_are_known_here() -> None:
    """A new name has to be looked up: add it here with the stand-ins."""
    assert npu_surface.find_used_names() == (
        {
            "current_device", "device_count", "get_device_name", "get_rng_state",
            "max_memory_allocated", "mem_get_info", "reset_peak_memory_stats", "set_compile_mode",
            "set_device", "set_rng_state", "synchronize",
        },
        {"repatch"},
    )  # fmt: skip


def test_what_a_wheel_lacks_is_found(tmp_path: Path) -> None:
    for module in (OLDER, NEWER):
        assert npu_surface.wheel_problems(wheel(tmp_path / "a.whl", hccl=module)) == []
    read = wheel(tmp_path / "a.whl", backend="lccl")
    assert npu_surface.wheel_problems(read) == ["the backend hccl"]
    read = wheel(tmp_path / "a.whl", INIT.replace("set_device", "set_dev"))
    assert npu_surface.wheel_problems(read) == ["torch_npu.npu.set_device"]
    other = wheel(tmp_path / "b.whl", config="def set_compile_mode(mode): ...\n")
    (problem,) = npu_surface.wheel_problems(other)
    assert "jit_compile" in problem


def test_names_that_a_mindspeed_lacks_are_found(tmp_path: Path) -> None:
    sources = tmp_path / "mindspeed"
    sources.mkdir()
    adaptor = sources / "megatron_adaptor.py"
    adaptor.write_text("def patch_features(): ...\n", encoding="utf-8")
    assert npu_surface.mindspeed_problems(tmp_path) == [
        "mindspeed.megatron_adaptor.repatch",
        *(f"the argument {name}" for name in sorted(npu_surface.find_arguments())),
    ]
    options = "".join(f"args.{name}\n" for name in npu_surface.find_arguments())
    adaptor.write_text(f"def repatch(args): ...\n{options}", encoding="utf-8")
    assert npu_surface.mindspeed_problems(tmp_path) == []
