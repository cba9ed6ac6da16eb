"""A reward function that scores like a built-in rule trains the same policy."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.same_run import MACHINE_METRICS
from tests.golden.runs import START, golden_config
from tests.processes import read_metrics
from tests.training import run
from tests.unit.rewards.test_remote import Server

TEXT = """
async def exact(prompt, response, ground_truth, extra_info, right=1.0):
    assert prompt.endswith("="), prompt
    return right * (response.strip() == ground_truth)
"""
TWO_RANKS = {
    "training.train_iters": 2,
    "resource_pool.main": 2,
    "data.val_files": str(START / "prompts.jsonl"),
    "+validation.max_samples": 5,  # the two replicas get three each
    "+reward.processes": 1,
}
pytestmark = pytest.mark.usefixtures("registries")


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


def metrics_of(
    out: Path, runtime: Any, keys: dict[str, Any], name: str = "grpo"
) -> list[dict[str, float]]:
    config = golden_config(name, out, keys)
    return read_metrics(run(config, runtime).path)


def test_a_function_trains_as_the_rule_that_it_repeats(warm_runtime, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(TEXT, encoding="utf-8")
    by_rule = metrics_of(tmp_path / "rule", warm_runtime, TWO_RANKS)
    own = {"+reward.function": f"{file}:exact"}
    by_function = metrics_of(tmp_path / "function", warm_runtime, {**TWO_RANKS, **own})
    assert "train/arithmetic/exact" in by_function[1]
    for rule, function in zip(by_rule, by_function, strict=True):
        assert function.pop("reward/failed", 0.0) == 0.0
        assert function.pop("reward/exact", None) == rule.pop("reward/accuracy", None)
        of_function = function.pop("train/arithmetic/exact", None)
        assert of_function == rule.pop("train/arithmetic/accuracy", None)
        assert function.pop("val/arithmetic/exact", None) == rule.pop(
            "val/arithmetic/accuracy", None
        )
        untimed = {k: v for k, v in rule.items() if not k.startswith(MACHINE_METRICS)}
        assert untimed == {k: function[k] for k in untimed}
    assert "critic/score/mean" in by_rule[1]


def run_with_server(
    runtime: Any, out: Path, server: Server, name: str, more: dict[str, Any]
) -> list[dict[str, float]]:
    """Metrics of two iterations of sixteen samples without those that measure the machine."""
    judge = f'[{{url: "{server.url}", name: judge}}]'
    keys = {
        "training.train_iters": 2,
        "training.global_batch_size": 16 if name == "gae" else 4 if name == "dapo" else 8,
        "actor_rollout.ppo_mini_batch_size": 8,
        "actor_rollout.micro_batch_size": 2,
        "+reward.functions": judge,
        "+reward.max_failed": 16,
    }  # fmt: skip
    if name == "gae":
        keys |= {"critic.critic_mini_batch_size": 8, "critic.micro_batch_size": 1}
    if name == "dapo":  # one step, which measures the KL
        keys |= {"actor_rollout.ppo_mini_batch_size": 16, "actor_rollout.ppo_epochs": 1}
        keys["+reward.max_failed"] = 160  # filtered groups are drawn up to ten times
    lines = metrics_of(out, runtime, {**keys, **more}, name)
    return [{k: v for k, v in m.items() if not k.startswith(MACHINE_METRICS)} for m in lines]


NAMES = ["gae", *(pytest.param(n, marks=pytest.mark.long) for n in ("dapo", "online_dpo"))]


@pytest.mark.parametrize("name", NAMES)
def test_scores_that_a_server_lost_have_no_part_in_training(warm_runtime, tmp_path, server, name):
    def judge(samples: list[dict[str, Any]]) -> tuple[int, Any]:
        sums = [sum((s["prompt"] + s["response"]).encode()) for s in samples]
        return 200, {"scores": [{"error": "lost"} if n % 3 == 0 else n % 2 for n in sums]}

    server.answer = judge
    runs = [
        run_with_server(
            warm_runtime, tmp_path / str(score), server, name, {"+reward.failed_score": score}
        )
        for score in (0.0, 9.0)
    ]
    assert runs[0] == runs[1]
    masked = [metrics.get("reward/masked", 0.0) for metrics in runs[0]]
    assert sum(masked) > 0 and max(masked) < 16
    for metrics in runs[0]:
        assert all(map(math.isfinite, metrics.values()))


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_without_any_score_has_no_gradient(warm_runtime, tmp_path, server, name):
    server.answer = lambda samples: (200, {"scores": [{"error": "lost"}] * len(samples)})
    for metrics in run_with_server(warm_runtime, tmp_path, server, name, {}):
        assert metrics["reward/masked"] == 16.0
        assert metrics["actor/grad_norm"] == metrics.get("critic/grad_norm", 0.0) == 0.0
