"""The bring-up of an NPU runs on the simulated one and agrees with its trace."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.npu_sim.processes import environment
from tests.processes import ROOT

STAGES = ("import", "patch", "collective", "forward", "update", "generate", "ppo")


def bring_up(scratch: Path, *stages: str) -> list[str]:
    """Its lines. The stage `collective` has two processes, each with a device of its own."""
    command = [sys.executable, "examples/tiny/bring_up.py", "--device", "npu"]
    done = subprocess.run(
        [*command, "--stages", ",".join(stages)],
        cwd=ROOT, env=environment(scratch, 2), capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    return done.stdout.splitlines()


@pytest.mark.long
def test_every_stage_agrees_with_the_trace(simulated, tmp_path):
    lines = bring_up(tmp_path, *STAGES)
    assert [line.split()[:2] for line in lines] == [[name, "ok"] for name in STAGES], lines
