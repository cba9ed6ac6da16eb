"""The simulated device, built once for all tests."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.npu_sim import build


@pytest.fixture(scope="session")
def simulated() -> Path:
    """The built device. Without a compiler tests are skipped, and fail where CI is set."""
    require(build.missing(), os.environ)
    return build.library()


def require(reason: str, environment: Mapping[str, str]) -> None:
    """reason: what is missing; empty = nothing"""
    if reason:
        (pytest.fail if environment.get("CI") else pytest.skip)(reason)
