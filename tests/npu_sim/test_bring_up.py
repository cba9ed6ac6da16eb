"""The bring-up of an NPU runs on the simulated one and agrees with its trace."""

import subprocess
import sys

import pytest

from tests.npu_sim.processes import environment
from tests.processes import ROOT

STAGES = ("import", "patch", "collective", "forward", "update", "generate", "ppo")


@pytest.mark.long
def test_every_stage_agrees_with_the_trace(simulated, tmp_path):
    """The stage `collective` has two processes, each with a device of its own."""
    command = [sys.executable, "examples/tiny/bring_up.py", "--device", "npu"]
    done = subprocess.run(
        [*command, "--stages", ",".join(STAGES)],
        cwd=ROOT, env=environment(tmp_path, 2), capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [[name, "ok"] for name in STAGES], lines
