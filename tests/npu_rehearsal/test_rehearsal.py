"""PPO through MindSpeed's attention, norm, activation, rotary and optimizer equals our CPU path."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.npu_rehearsal import ray_run, run
from tests.npu_rehearsal.cases import REQUIRED

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        bool(run.missing()), reason=f"{' and '.join(run.VARIABLES)} must name checkouts"
    ),
]


@pytest.mark.parametrize("name", REQUIRED)
def test_five_iterations_equal_those_on_cpu(tmp_path: Path, name: str) -> None:
    assert run.rehearse(name, tmp_path)


@pytest.mark.parametrize("name", (*ray_run.CASES, ray_run.BRING_UP))
def test_the_command_on_a_cluster_with_npus_equals_that_on_cpu(name: str) -> None:
    assert ray_run.main([name]) == 0
