"""A run trains with the estimator, reward rule and rollout engine of examples/plugins/parts.py."""

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
