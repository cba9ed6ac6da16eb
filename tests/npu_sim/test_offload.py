"""Four roles need as much memory of a device as planned, whatever they offload."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.npu_sim.offload_run import MIB, MODES
from tests.npu_sim.processes import environment
from tests.processes import ROOT

pytestmark = pytest.mark.long


def start(out: Path, mode: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """With copies that end late."""
    return subprocess.run(
        [sys.executable, "-m", "tests.npu_sim.offload_run", str(out), mode],
        cwd=ROOT, env=environment(out, 1, RLXF_SIM_DELAYED="1", **variables),
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_a_run_takes_what_the_plan_says(simulated: Path, tmp_path: Path, mode: str) -> None:
    done = start(tmp_path, mode)
    assert done.returncode == 0, done.stderr[-4000:]
    planned, peak = json.loads(done.stdout.splitlines()[-1])
    assert peak == pytest.approx(planned, rel=0.1)


def test_the_plans_memory_is_enough_and_less_is_not(simulated: Path, tmp_path: Path) -> None:
    """The run finishes with a tenth more than planned, and names the device with a seventh less."""
    (tmp_path / "measured").mkdir()
    planned, _ = json.loads(start(tmp_path / "measured", "both").stdout.splitlines()[-1])
    for factor, ends in ((1.1, True), (0.85, False)):
        out = tmp_path / f"{factor}"
        out.mkdir()
        limit = math.floor(planned * factor / MIB)
        done = start(out, "both", RLXF_SIM_MEMORY_MIB=str(limit))
        assert (done.returncode == 0) is ends, done.stderr[-4000:]
        if not ends:
            assert "NPU out of memory. Tried to allocate" in done.stderr
