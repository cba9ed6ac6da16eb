"""A run that does not read a reference builds none, and its numbers are the same."""

from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.roles.reference import ReferenceRole
from tests.golden import runs

NO_PENALTY = {"algorithm.kl_ctrl.kl_coef": 0.0, "training.train_iters": 2}


@pytest.mark.parametrize("name", ["gae", "grpo"])  # KL in the reward; KL in the loss
def test_a_run_without_a_penalty_needs_no_reference(
    warm_runtime: Any, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {**NO_PENALTY, "logging.reference_kl": True}
    expected = runs.run(name, tmp_path / "with", warm_runtime, asked)
    expected.pop("critic/kl")
    expected.pop("actor/kl_loss", None)
    monkeypatch.delattr(ReferenceRole, "log_probs")
    found = runs.run(name, tmp_path / "without", warm_runtime, NO_PENALTY)
    assert found == expected
