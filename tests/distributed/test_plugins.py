"""Runs train with the parts of examples/plugins."""

from pathlib import Path

import pytest

from tests.golden.runs import golden_config
from tests.processes import read_lines, read_metrics
from tests.training import run

PARTS = Path(__file__).parents[2] / "examples" / "plugins" / "parts.py"
OWN = {
    "training.plugins": f"[{PARTS}]",
    "algorithm.adv_estimator": "over_median",
    "+reward.rules": "{arithmetic: last_digit}",
    "training.train_iters": 4,
}


@pytest.mark.long
def test_a_file_of_ones_own_parts_trains_the_tiny_task(warm_runtime, tmp_path, registries):
    """Its engine draws the tokens that the native one draws, from the weights of each iteration."""
    found = {}
    for engine in ("native", "one_by_one", "transformers"):
        config = golden_config("grpo", tmp_path / engine, {**OWN, "rollout.engine": engine})
        directory = run(config, warm_runtime)
        found[engine] = read_lines(directory.samples)
        metrics = read_metrics(directory.path)
    own, *others = found.values()
    for other in others:
        assert [s["response_ids"] for s in own] == [s["response_ids"] for s in other]
    assert {s["score"] for s in own} == {0.0, 0.5, 1.0}
    assert {tuple(s["weights_version"]) for s in own} == {(n, n) for n in range(4)}
    assert metrics[-1]["rollout/log_prob_gap_max"] < 1e-4
    assert metrics[-1]["critic/kl"] > 0.01, "the policy has not moved"
    assert (directory.config).read_text().count("sha256: ") == 1


MORE = {
    "training.plugins": f"[{PARTS.with_name('more_parts.py')}]",
    "training.train_iters": 2,
    "algorithm.objective": "best_of_group",
    "training.backend": "timed",
    "actor_rollout.policy_loss": "soft_clip",
    "actor_rollout.ppo_mini_batch_size": 32,
    "reward.kind": "role",
    "resource_pool.reward": 1,
    "placement.reward": "reward",
    "data.val_files": "[]",
    "validation.interval": 0,
}


@pytest.mark.long
def test_a_loss_an_objective_a_data_source_and_a_role_of_ones_own_train(
    warm_runtime, tmp_path, registries
):
    (tmp_path / "doubles.sums").write_text('{"first": 10, "last": 49}')
    files = {"data.train_files": tmp_path / "doubles.sums"}
    directory = run(golden_config("grpo", tmp_path, {**MORE, **files}), warm_runtime)
    samples, metrics = read_lines(directory.samples), read_metrics(directory.path)
    assert {sample["prompt"][:2] for sample in samples} <= {str(n) for n in range(10, 50)}
    assert any(0.0 < sample["score"] < 1.0 for sample in samples), "the role scores digits"
    assert metrics[0]["critic/advantages/min"] == 0.0 < metrics[0]["critic/advantages/max"]
    assert all(line["actor/step_s"] > 0 for line in metrics)
    own = read_metrics(run(golden_config("grpo", tmp_path / "ppo", {
        **MORE, **files, "actor_rollout.policy_loss": "ppo",
    }), warm_runtime).path)  # fmt: skip
    assert own[0]["critic/score/mean"] == metrics[0]["critic/score/mean"]
    assert own[0]["actor/pg_loss"] != metrics[0]["actor/pg_loss"], (
        "the second step is clipped softly"
    )
