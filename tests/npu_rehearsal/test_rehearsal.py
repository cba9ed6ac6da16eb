"""PPO with MindSpeed's attention, norm, activation, rotary and optimizer equals the CPU path."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.npu_rehearsal import ray_run, run
from tests.npu_rehearsal.cases import CASES, REQUIRED

pytestmark = pytest.mark.long
with_mindspeed = pytest.mark.skipif(
    not os.environ.get(run.VARIABLES[0]),
    reason=f"{run.VARIABLES[0]} names no checkout of MindSpeed; docs/npu.md, section Rehearsal",
)


@pytest.fixture
def checkouts() -> None:
    assert not run.missing(), f"{' and '.join(run.missing())} must name a folder: see docs/npu.md"


@with_mindspeed
@pytest.mark.parametrize("name", REQUIRED)
def test_a_run_equals_that_on_cpu(checkouts: None, tmp_path: Path, name: str) -> None:
    assert run.rehearse(name, tmp_path)


@with_mindspeed
@pytest.mark.parametrize("name", (*ray_run.CASES, ray_run.BRING_UP))
def test_the_command_on_a_cluster_with_npus_equals_that_on_cpu(checkouts: None, name: str) -> None:
    assert ray_run.main([name]) == 0


def test_two_ranks_of_a_case_go_through_on_cpu(tmp_path: Path) -> None:
    """What the rehearsal starts; needs neither MindSpeed nor a checkout of Megatron-LM."""
    folder, out = tmp_path / "PLAIN", tmp_path / "out"
    run.make_models(folder, "PLAIN", tmp_path)
    run.run_case("cpu", folder, out, "tp2", tmp_path)
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 2
    for rank in range(CASES["tp2"].ranks):
        assert json.loads((out / f"reads.{rank}.json").read_text())
