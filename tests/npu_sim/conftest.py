"""The simulated device, built once for all tests."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.npu_sim import build


@pytest.fixture(scope="session")
def simulated() -> Path:
    """The library of the built device. Where it cannot be built, skip, or fail if CI is set."""
    require(build.missing(), os.environ)
    return build.library()


def require(reason: str, environment: Mapping[str, str]) -> None:
    """Skip the test for a reason, or fail it where the variable CI is set; "" = do nothing."""
    if reason:
        (pytest.fail if environment.get("CI") else pytest.skip)(reason)
