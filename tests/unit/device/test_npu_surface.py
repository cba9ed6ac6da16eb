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
def test_real_packages_have_every_name_that_is_used(package):
    assert npu_surface.problems(package) == []
