"""Passes that a run can do without are not made, and its numbers are the same.

With one step per iteration the update computes old log-probs itself.
"""

from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.roles.actor import ActorRole
from mindspeed_rlxf.roles.reference import ReferenceRole
from tests.chaos.same_run import MACHINE_METRICS
from tests.golden import runs
from tests.processes import read_metrics

ONE_STEP = {
    "actor_rollout.ppo_epochs": 1,
    "actor_rollout.ppo_mini_batch_size": 64,
    "training.train_iters": 2,
}
ADAPTIVE = {"algorithm.kl_ctrl.type": "adaptive", "algorithm.kl_ctrl.target_kl": 0.001}
ASKED = {"algorithm.kl_ctrl.kl_coef": 0.0, "logging.reference_kl": True}
NEEDS_THE_PASS = {"timing/old_log_prob", "rollout/log_prob_gap_max"}


def metrics_of(
    runtime: Any, out: Path, name: str, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, float]]:
    monkeypatch.setattr(runs, "KEPT", ())
    runs.run(name, out, runtime, {**ONE_STEP, **keys})
    return read_metrics(out)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("gae", ASKED),  # a critic, and a KL that only the log has
        # the coefficient of the loss follows the measured KL
        pytest.param("grpo", ADAPTIVE, marks=pytest.mark.long),
        # a ratio of responses, no reference
        pytest.param("rloo", {**ASKED, "logging.reference_kl": False}, marks=pytest.mark.long),
        pytest.param("online_dpo", {"algorithm.old_log_probs": "auto"}, marks=pytest.mark.long),
    ],
)
def test_the_update_gives_the_numbers_of_the_pass(warm_runtime, tmp_path, monkeypatch, name, keys):
    recompute = {**keys, "algorithm.old_log_probs": "recompute"}
    expected = metrics_of(warm_runtime, tmp_path / "pass", name, recompute, monkeypatch)
    monkeypatch.delattr(ActorRole, "log_probs")
    found = metrics_of(warm_runtime, tmp_path / "auto", name, keys, monkeypatch)
    recorded_on_this_machine = runs.read_trace(name)[0] == runs.fingerprint()
    for mine, theirs in zip(found, expected, strict=True):
        assert theirs.keys() - mine.keys() - {"memory/old_log_prob"} == NEEDS_THE_PASS
        assert mine.keys() <= theirs.keys()
        numbers = {key for key in mine if not key.startswith(MACHINE_METRICS)}
        assert ("critic/kl" in numbers) == (name != "rloo")
        assert "rollout/log_prob_gap_mean" in numbers
        if recorded_on_this_machine:
            assert {k: mine[k] for k in numbers} == {k: theirs[k] for k in numbers}
        for key in numbers:
            assert mine[key] == pytest.approx(theirs[key], rel=1e-6, abs=1e-6), key


def test_online_dpo_of_several_steps_makes_no_pass(warm_runtime, tmp_path, monkeypatch):
    keys: dict[str, Any] = {"actor_rollout.ppo_mini_batch_size": 16}
    expected = metrics_of(warm_runtime, tmp_path / "pass", "online_dpo", keys, monkeypatch)
    monkeypatch.delattr(ActorRole, "log_probs")
    keys["algorithm.old_log_probs"] = "auto"
    found = metrics_of(warm_runtime, tmp_path / "auto", "online_dpo", keys, monkeypatch)
    for mine, theirs in zip(found, expected, strict=True):
        for key in ("actor/dpo_loss", "actor/grad_norm", "critic/score/mean"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-6), key
        # of the first step alone, whose weights are those of generation: rounding only
        assert mine["rollout/log_prob_gap_mean"] < 1e-5


@pytest.mark.parametrize("name", ["gae", "grpo"])  # KL in the reward; KL in the loss
def test_a_run_without_a_penalty_needs_no_reference(warm_runtime, tmp_path, name, monkeypatch):
    keys = {"algorithm.kl_ctrl.kl_coef": 0.0, "training.train_iters": 2}
    asked = {**keys, "logging.reference_kl": True}
    expected = runs.run(name, tmp_path / "with", warm_runtime, asked)
    expected.pop("critic/kl")
    expected.pop("actor/kl_loss", None)
    monkeypatch.delattr(ReferenceRole, "log_probs")
    assert runs.run(name, tmp_path / "without", warm_runtime, keys) == expected
