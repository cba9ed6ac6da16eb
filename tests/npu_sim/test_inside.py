"""The tests of `inside/`, in one process with two simulated NPUs."""

from tests.npu_sim.processes import environment
from tests.processes import run_python


def test_the_device_its_rules_and_the_package_on_it(simulated, tmp_path):
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=0"]
    words += [f"--basetemp={tmp_path / 'inside'}", "tests/npu_sim/inside"]
    assert " passed" in run_python(*words, **environment(tmp_path, 2, RLXF_SIM_INSIDE="1"))
