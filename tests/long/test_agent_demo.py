"""PPO teaches the tiny policy to call its calculator, and only where calls help."""

import json
from pathlib import Path

import pytest

from tests.processes import ROOT, read_metrics, run_python
from tests.unit.agents import own_programs

ACCURACY = "val/arithmetic/accuracy"

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the demo's policy and data under outputs/agent."""
    folder = tmp_path_factory.mktemp("agent")
    (folder / "examples").symlink_to(ROOT / "examples")
    script = ROOT / "examples/agent/make_policy.py"
    run_python(script, "--output", "outputs/agent", folder=folder, timeout_s=900)
    return folder


def train(folder: Path, name: str, *overrides: str) -> tuple[list[float], float]:
    """Return the greedy accuracies, and the share of the last greedy samples that call."""
    words = (
        "--config-dir", "examples/agent", "--config-name", "ppo", f"training.output_dir={name}",
        "device.kind=cpu", "runtime=local", "resource_pool.main=1", *overrides,
    )  # fmt: skip
    run_python(ROOT / "ray_gpt.py", *words, folder=folder, timeout_s=900)
    metrics = read_metrics(folder / name)
    lines = (folder / name / "val_samples.jsonl").read_text(encoding="utf-8").splitlines()
    samples = [json.loads(line) for line in lines]
    last = [each for each in samples if each["iteration"] == samples[-1]["iteration"]]
    num_calls = sum(len(sample["turns"]) == 2 for sample in last)
    return [line[ACCURACY] for line in metrics if ACCURACY in line], num_calls / len(last)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_policy_learns_to_call(demo: Path, seed: int) -> None:
    accuracies, share = train(demo, f"seed-{seed}", f"training.seed={seed}")
    assert accuracies[0] < 0.6
    assert accuracies[-1] >= 0.97
    assert share >= 0.95


def test_wrong_results_teach_no_calls(demo: Path) -> None:
    accuracies, _ = train(demo, "shuffled", "rollout.agent=shuffled_calculator")
    assert max(accuracies) <= 0.6


@pytest.mark.parametrize("name", ["function", "openai"])
def test_a_program_trains_the_policy_as_the_agent_in_the_process_does(
    demo: Path, name: str
) -> None:
    """Bit by bit: every sampled token, and every metric but times."""
    program = f"{own_programs.__file__}:calculate"
    if name == "openai":
        pytest.importorskip("openai", reason="the program uses the package openai")
        program = "examples/agent/openai_calculator.py:solve"  # a command imports each time
    few = ("training.train_iters=4", "rollout.agent_lag=2", "rollout.turn_timeout_s=600")
    train(demo, "agent", *few)
    train(demo, name, *few, "rollout.agent=program", f"rollout.program={program}")
    ours, theirs = read_metrics(demo / "agent"), read_metrics(demo / name)
    timed = ("timing/", "throughput/", "memory/", "idle/")
    for one, other in zip(ours, theirs, strict=True):
        assert without(one, timed) == without(other, timed)
    texts = [(demo / n / "samples.jsonl").read_text(encoding="utf-8") for n in ("agent", name)]
    assert texts[0] == texts[1]


def without(line: dict[str, float], prefixes: tuple[str, ...]) -> dict[str, float]:
    return {key: value for key, value in line.items() if not key.startswith(prefixes)}
