"""The simulated device, built once for all tests."""

import os
from pathlib import Path

import pytest

from tests.npu_sim import build


@pytest.fixture(scope="session")
def simulated() -> Path:
    """The library of the built device. Where it cannot be built, skip, or fail if CI is set."""
    if reason := build.missing():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    return build.library()
