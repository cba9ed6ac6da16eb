"""PPO learns the tiny task of the demo, and learns it only from a correct reward."""

from pathlib import Path

import pytest

from tests.processes import ROOT, read_metrics, run_python

ACCURACY = "val/arithmetic/accuracy"
ALONE = ["runtime=local", "resource_pool.main=1"]

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the demo's models and data under outputs/tiny."""
    folder = tmp_path_factory.mktemp("demo")
    words = ROOT / "examples/tiny/make.py", "--output", "outputs/tiny", "--reward-model"
    run_python(*words, folder=folder)
    return folder


def metrics_of(
    folder: Path, name: str, *overrides: str, config: str = "ppo_trainer_tiny",
    script: str = "ray_gpt.py",
) -> list[dict]:  # fmt: skip
    words = ["--config-name", config, "device.kind=cpu", f"training.output_dir={name}", *overrides]
    run_python(ROOT / script, *words, folder=folder, timeout_s=900)
    return read_metrics(folder / name)


def accuracies(lines: list[dict]) -> list[float]:
    return [line[ACCURACY] for line in lines if ACCURACY in line]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_rule_reward_lifts_accuracy_from_under_60_to_90_percent(tiny: Path, seed: int) -> None:
    curve = accuracies(metrics_of(tiny, f"rule-{seed}", f"training.seed={seed}"))
    assert curve[0] < 0.6
    assert curve[-1] >= 0.9


def test_adapters_learn_it_too(tiny: Path) -> None:
    """With ten times the learning rates, as is usual for adapters."""
    keys = "training.lora={rank: 8, alpha: 16}", "actor_rollout.lr=1e-3", "critic.lr=3e-3"
    curve = accuracies(metrics_of(tiny, "adapters", *keys))
    assert curve[0] < 0.6
    assert curve[-1] >= 0.9


@pytest.mark.parametrize("config", ["grpo_trainer_tiny", "online_dpo_trainer_tiny"])
def test_stages_without_a_critic_learn_it_too(tiny: Path, config: str) -> None:
    curve = accuracies(metrics_of(tiny, config, config=config))
    assert curve[0] < 0.6
    assert curve[-1] >= 0.95


def test_reward_model_lifts_its_score_and_not_at_the_cost_of_accuracy(tiny: Path) -> None:
    lines = metrics_of(tiny, "rm-1", config="ppo_trainer_tiny_rm")
    scores = [line["critic/score/mean"] for line in lines if "critic/score/mean" in line]
    assert sum(scores[-10:]) / 10 > sum(scores[:10]) / 10
    curve = accuracies(lines)
    assert min(curve) >= curve[0]


@pytest.mark.parametrize("cause", ["learning rate 0", "shuffled rewards"])
def test_nothing_is_learnt_without_learning_rate_or_reward(tiny: Path, cause: str) -> None:
    if cause == "learning rate 0":
        lines = metrics_of(tiny, "zero", "actor_rollout.lr=0.0", "critic.lr=0.0")
    else:
        lines = metrics_of(tiny, "shuffled", *ALONE, script="tests/long/shuffled_rewards.py")
    curve = accuracies(lines)
    assert len(curve) > 3
    assert all(abs(accuracy - curve[0]) <= 0.03 for accuracy in curve)
