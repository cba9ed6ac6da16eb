"""A run directory of an older version goes on as that version went on.

`older_run` was written before checkpoints had one index per role: two iterations of
`grpo_trainer_tiny` in /srv/rlxf, with the keys below; `iteration_3.jsonl` is that version's next.
"""

import shutil
from pathlib import Path

import pytest

from mindspeed_rlxf.reporting.jsonl import read_jsonl
from tests.chaos.same_run import MACHINE_METRICS
from tests.processes import ROOT, read_metrics, run_python

STORED = ROOT / "tests" / "golden" / "older_run"
PROMPTS = ROOT / "tests" / "golden" / "start" / "prompts.jsonl"
KEYS = [
    "model.tiny.num_layers=1", "model.tiny.hidden_size=16", "model.tiny.ffn_hidden_size=32",
    "training.tokenizer_name_or_path=start", "actor_rollout.load=start", "ref.load=start",
    "actor_rollout.ppo_mini_batch_size=32", "actor_rollout.micro_batch_size=16",
    "actor_rollout.lr=2e-4", "actor_rollout.ppo_epochs=2", "actor_rollout.n_samples_per_prompt=4",
    "training.global_batch_size=16", "data.train_files=start/prompts.jsonl", "data.val_files=[]",
    "validation.interval=0", "resource_pool.main=1", "device.kind=cpu", "runtime.kind=local",
    "training.output_dir=run", "training.save_interval=1", "training.keep_last=1",
    "logging.samples=0",
]  # fmt: skip


def test_a_run_directory_of_an_older_version_resumes(tmp_path: Path) -> None:
    shutil.copytree(STORED, tmp_path, dirs_exist_ok=True)
    shutil.copy(PROMPTS, tmp_path / "start" / "prompts.jsonl")
    stored = tmp_path / "run" / "config.yaml"
    stored.write_text(stored.read_text().replace("/srv/rlxf", str(tmp_path)))
    words = ROOT / "ray_gpt.py", "--config-name", "grpo_trainer_tiny", *KEYS
    said = run_python(*words, "training.train_iters=3", folder=tmp_path, timeout_s=300)
    assert "resumed from" in said
    expected = next(read_jsonl(STORED / "iteration_3.jsonl"))["metrics"]
    found = read_metrics(tmp_path / "run")[-1]
    names = [name for name in expected if not name.startswith(MACHINE_METRICS)]
    # Not equal: another processor may round otherwise.
    assert {name: found[name] for name in names} == pytest.approx(
        {name: expected[name] for name in names}, rel=1e-3, abs=1e-5
    )
