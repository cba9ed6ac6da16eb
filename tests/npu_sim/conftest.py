"""The simulated device, built once for all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.npu_sim import build


@pytest.fixture(scope="session")
def simulated() -> Path:
    """The built device. Without a compiler tests are skipped, and fail where CI is set."""
    if reason := build.missing():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    return build.library()
