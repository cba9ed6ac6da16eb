"""Real torch_npu wheels and MindSpeed sources have every name that our code uses.

RLXF_NPU_PACKAGES names wheels and source folders, separated as in PATH.
"""

import os
from pathlib import Path

import pytest

from tests.unit.device import npu_surface

NAMED = [Path(p) for p in os.environ.get("RLXF_NPU_PACKAGES", "").split(os.pathsep) if p]
NONE = [pytest.param(None, marks=pytest.mark.skip(reason="RLXF_NPU_PACKAGES names no package"))]


@pytest.mark.parametrize("package", NAMED or NONE, ids=str)
def test_real_packages_have_every_name_that_is_used(package: Path) -> None:
    assert npu_surface.problems(package) == []


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
