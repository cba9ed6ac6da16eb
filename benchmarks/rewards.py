"""Measure whether rewards are computed while responses are still generated.

Generation is a stub: 64 responses, finished at equal distances over 20 s. The reward function
sleeps for 1 s, in 8 processes. An iteration should take no longer than generation and the reward of
the last response, and 10% for everything else (`bound_s`); rewards one after the other would take
64 s more. Prints one JSON line.

    python benchmarks/rewards.py [--generation 20] [--reward 1] [--workers 8] [--samples 64]
"""

import argparse
import json
import tempfile
from pathlib import Path

from mindspeed_rlxf.checkpoint.directory import RunDirectory
from mindspeed_rlxf.cluster.local import LocalRuntime
from mindspeed_rlxf.config.compose import compose
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.trainer.preflight import prepare
from mindspeed_rlxf.trainer.run import training

START = Path(__file__).resolve().parents[1] / "tests" / "golden" / "start"
ITERATIONS = 3
ENGINE = """
import time
from mindspeed_rlxf.rollout.rollout_engine import register_rollout_engine
from mindspeed_rlxf.rollout.rollout_engine import FinishReason, GenerationResult, GenerationStats

@register_rollout_engine("stub")
class Stub:
    def __init__(self, config, trained):
        self.weights_version = 0

    def update_weights(self, tensors, version):
        for _ in tensors:
            pass
        self.weights_version = version

    def wake(self): ...
    def sleep(self): ...
    def stats(self):
        return GenerationStats()

    def generate(self, requests):
        for request in requests:
            time.sleep({seconds} / len(requests))
            tokens = [4 + request.sample_id % 9, request.settings.eos_token_ids[0]]
            yield GenerationResult(
                request.place, tokens, [-2.0, -2.0], FinishReason.STOP, self.weights_version
            )
"""
REWARD = """
import time

def score(prompt, response, ground_truth, extra_info, seconds):
    time.sleep(seconds)
    return float(response.strip() == ground_truth)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--generation", type=float, default=20.0)
    parser.add_argument("--reward", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--samples", type=int, default=64)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        metrics = run(Path(folder), arguments)
    seconds = [line["timing/all"] for line in metrics]
    bound = (arguments.generation + arguments.reward) * 1.1
    report = {
        "benchmark": "rewards",
        **vars(arguments),
        "iteration_s": [round(s, 2) for s in seconds],
        "after_generation_s": [round(line["timing/reward"], 2) for line in metrics],
        "bound_s": round(bound, 2),
        "within": max(seconds) <= bound,
    }
    print(json.dumps(report), flush=True)


def run(folder: Path, arguments: argparse.Namespace) -> list[dict[str, float]]:
    """Train in this process; return the metrics of each iteration. folder: for input and output"""
    (folder / "engine.py").write_text(ENGINE.replace("{seconds}", str(arguments.generation)))
    (folder / "reward.py").write_text(REWARD)
    function = (
        f"{{function: '{folder}/reward.py:score', arguments: {{seconds: {arguments.reward}}}}}"
    )
    keys = {
        "model.tiny.num_layers": 2,
        "model.tiny.hidden_size": 48,
        "model.tiny.ffn_hidden_size": 96,
        "training.train_iters": ITERATIONS,
        "training.tokenizer_name_or_path": START,
        "training.global_batch_size": arguments.samples // 4,
        "training.output_dir": folder / "run",
        "training.plugins": f"[{folder}/engine.py]",
        "rollout.engine": "stub",
        "actor_rollout.load": START,
        "actor_rollout.n_samples_per_prompt": 4,
        "actor_rollout.ppo_mini_batch_size": arguments.samples,
        "actor_rollout.micro_batch_size": arguments.samples,
        "ref.load": START,
        "data.train_files": START / "prompts.jsonl",
        "data.val_files": "[]",
        "validation.interval": 0,
        "resource_pool.main": 1,
        "device.kind": "cpu",
        "runtime": "local",
        "reward.function": function,
        "reward.processes": arguments.workers,
    }
    tree = compose("grpo_trainer_tiny", [f"{key}={value}" for key, value in keys.items()])
    config = resolve(tree, "rewards")
    prepared, runtime = prepare(config), LocalRuntime(DeviceKind.CPU)
    directory = RunDirectory.create(config)
    with training(config, prepared, directory, runtime) as trainer:
        trainer.fit()
    runtime.shutdown()
    return [json.loads(line)["metrics"] for line in directory.metrics.open(encoding="utf-8")]


if __name__ == "__main__":
    main()
