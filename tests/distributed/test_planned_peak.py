"""The peak memory of a role is the planned one, within 10%."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.conftest import REPOSITORY
from tests.distributed.traced_peak import SHAPES

BOUNDS = {"forward": (0.95, 1.1), "update": (0.95, 1.1)}


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.long, *[pytest.mark.large] * name.startswith("real width")]


@pytest.mark.parametrize("name", [pytest.param(each, marks=marks_of(each)) for each in SHAPES])
def test_as_much_is_planned_as_is_allocated(tmp_path: Path, name: str) -> None:
    """At real width 22 GB of free memory are needed, and some minutes."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.distributed.traced_peak", name, str(tmp_path)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {each["phase"] for each in found} == set(BOUNDS), done.stdout + done.stderr
    for each in found:
        least, most = BOUNDS[each["phase"]]
        assert least <= each["planned"] / each["allocated"] <= most, each
