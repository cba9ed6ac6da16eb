"""Scripts of examples/library train as the command does, and with classes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import read_lines, read_metrics

ROOT = Path(__file__).parents[2]
START = "tests/golden/start"
SMALL = (
    f"actor_rollout_ref.model.path={START}", f"critic.model.path={START}",
    f"data.train_files={START}/prompts.jsonl", f"data.val_files={START}/prompts.jsonl",
    "data.val_max_samples=8", "data.train_batch_size=64", "trainer.total_training_steps=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=32", "trainer.n_gpus_per_node=1",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16", "trainer.val_before_train=false",
)  # fmt: skip
CRITIC_SIZE = "critic.ppo_micro_batch_size_per_gpu=16"
TIMED = ("timing/", "throughput/", "idle/", "memory/")


def start(out: Path, *command: str) -> subprocess.Popen[str]:
    given = [*command, *SMALL, CRITIC_SIZE, f"trainer.default_local_dir={out}"]
    paths = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_ADDRESS": "local"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, *given], cwd=ROOT, env=paths, **pipes)  # type: ignore[call-overload, no-any-return]


def finish(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        try:
            output, _ = process.communicate(timeout=300)
        finally:
            process.kill()
        assert process.returncode == 0, output


def test_the_curve_of_a_script_is_that_of_the_command_bit_by_bit(forks, tmp_path):
    out = tmp_path / "script", tmp_path / "command"
    programs = (
        ["examples/library/main_ppo.py"],
        ["ray_gpt.py", "--verl-config", "examples/library/ppo.yaml"],
    )
    for folder, words in zip(out, programs, strict=True):
        given = ["runtime.kind=local", *SMALL, CRITIC_SIZE, f"trainer.default_local_dir={folder}"]
        forks.run(*words, *given, megatron=True)
    script, command = (
        [{k: v for k, v in line.items() if not k.startswith(TIMED)} for line in read_metrics(path)]
        for path in out
    )
    assert len(script) == 2 and script[1]["actor/grad_norm"] > 0
    assert script == command
    assert (out[0] / "samples.jsonl").read_bytes() == (out[1] / "samples.jsonl").read_bytes()
    weights = [next((path / "final" / "actor_hf").glob("*.safetensors")) for path in out]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.long
def test_a_loss_and_a_reward_role_of_a_script_run_on_the_devices(tmp_path):
    finish(start(tmp_path / "own", "examples/library/own_role.py"))
    samples = read_lines(tmp_path / "own" / "samples.jsonl")
    assert any(0.0 < sample["score"] < 1.0 for sample in samples), "the role scores digits"
    metrics = read_metrics(tmp_path / "own")
    assert all(line["actor/pg_clipfrac"] == 0.0 for line in metrics), "the loss has no clip"
    assert list((tmp_path / "own" / "logs" / "reward").iterdir())


SCRIPT = """
import runpy
import sys
import ray

@ray.remote(num_cpus=1)
class TaskRunner:
    def run(self, options):
        sys.argv[1:] = options
        runpy.run_path("examples/library/main_ppo.py")["main"]()

if __name__ == "__main__":
    ray.init(num_cpus=3, include_dashboard=False, object_store_memory=10**8)
    if {in_task}:
        ray.get(TaskRunner.remote().run.remote(sys.argv[1:]))
    else:
        runpy.run_path("examples/library/main_ppo.py")["main"]()
    assert ray.is_initialized(), "the cluster is the script's"
"""


@pytest.mark.long
@pytest.mark.parametrize("in_task", [False, True])
def test_a_script_runs_on_the_cluster_that_it_has_begun(tmp_path, in_task):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(in_task=in_task))
    finish(start(tmp_path / "run", str(script), "device.kind=cpu"))
    assert len(read_metrics(tmp_path / "run")) == 2
