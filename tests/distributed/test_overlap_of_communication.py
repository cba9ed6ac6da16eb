"""Communication beside computation changes no number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.golden import runs

TWO_RANKS = {
    "resource_pool.main": 2,
    "training.train_iters": 2,
    "actor_rollout.use_distributed_optimizer": True,
    "critic.use_distributed_optimizer": True,
    "actor_rollout.micro_batch_size": 8,
}


def test_overlapped_reductions_and_gathers_change_no_number(
    warm_runtime: Any, tmp_path: Path
) -> None:
    """Four steps an iteration, of several micro-batches; generation reads the gathered weights."""
    plain = runs.run("gae", tmp_path / "plain", warm_runtime, TWO_RANKS)
    keys = ("overlap_grad_reduce", "overlap_param_gather")
    roles = ("actor_rollout", "critic")
    overlaps = {f"{role}.{key}": True for role in roles for key in keys}
    found = runs.run("gae", tmp_path / "found", warm_runtime, {**TWO_RANKS, **overlaps})
    assert found == {key: pytest.approx(values, rel=1e-6) for key, values in plain.items()}
