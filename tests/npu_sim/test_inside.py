"""The tests of `inside/`, in one process with two simulated NPUs."""

import subprocess
import sys

from tests.npu_sim.processes import environment
from tests.processes import ROOT


def test_the_device_its_rules_and_the_package_on_it(simulated, tmp_path):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=0"]
    done = subprocess.run(
        [*command, f"--basetemp={tmp_path / 'inside'}", "tests/npu_sim/inside"],
        cwd=ROOT, env=environment(tmp_path, 2, RLXF_SIM_INSIDE="1"),
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:]
    assert " passed" in done.stdout.splitlines()[-1]
