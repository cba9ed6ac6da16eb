"""PPO with four roles ends at the same weights on the simulated device as on a CPU."""

import pytest

from tests.npu_sim import run
from tests.npu_sim.cases import CASES

SHORT = "tp1 generates"  # `inside/test_hccl.py` has the collectives


@pytest.mark.parametrize(
    "name",
    [name if name == SHORT else pytest.param(name, marks=pytest.mark.long) for name in CASES],
)
def test_a_run_equals_that_on_cpu(simulated, tmp_path, name):
    """With MindSpeed itself where RLXF_MINDSPEED names it, else with the small adaptor."""
    assert run.rehearse(name, tmp_path)
