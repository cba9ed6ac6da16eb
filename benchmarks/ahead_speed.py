"""Measure what generation ahead of training gains: seconds per iteration over those of K = 0.

All runs are disaggregated, one process that trains and one that generates, on a Ray cluster of
their own. `sleeping`: the devices sleep, so any machine measures the schedule and its overhead. A
decode step takes 0.2 s + 1 ms per row, and what goes on after a change of weights is prefilled
again at 1,500 tokens per second.

    equal          an update takes as long as the generation of a batch
    one long       one of 32 responses is eight times as long as the others
    updates        an update takes nine times as long as generation

`cpu`: a model of 18.9 M parameters, GRPO, responses of 8 to 512 tokens / 4, one thread for each
process; tokens per second of K = 0, 1 and 3. The first iterations are left out, and the last two,
which generate less ahead, and save. Prints one JSON line.

    python benchmarks/ahead_speed.py [--only equal "one long" updates cpu] [--iterations 10]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.sleeping import ROW_S, STEP_S

ROOT = Path(__file__).resolve().parents[1]
GROUPS, GROUP_SIZE = 8, 4
ROWS = GROUPS * GROUP_SIZE  # samples of an iteration
BASE_TOKENS = 16  # of a response; a slice is half of it
EQUAL = [BASE_TOKENS] * ROWS
GENERATION_S = BASE_TOKENS * (STEP_S + ROW_S * ROWS)
# name -> lengths of responses, seconds of an update, K, the gain that it must have
SLEEPING: dict[str, tuple[list[int], float, int, float]] = {
    "equal": (EQUAL, GENERATION_S, 1, 1.8),
    "one long": ([4] * (ROWS - 1) + [32], GENERATION_S / 4, 4, 2.2),
    "updates": ([2] * ROWS, 9 * GENERATION_S / 8, 4, 0.98),
}
WARM, LAST = 3, 2  # iterations that are not measured, at the start and at the end
APART = {
    "placement.actor_rollout": "actor",
    "+resource_pool.actor": 2,
    "resource_pool.main": 1,
    "actor_rollout.num_gpus_for_train": 1,
    "actor_rollout.num_gpus_for_infer": 1,
}
CPU_STALENESS = (0, 1, 3)
CPU_LIMIT, CPU_PROMPT = 128, 64  # tokens


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=[*SLEEPING, "cpu"], default=[*SLEEPING, "cpu"])
    parser.add_argument("--iterations", type=int, default=10, help="measured ones of each run")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # the keys of one run (JSON)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(seconds_of(json.loads(arguments.child))))
        return
    found: dict[str, Any] = {"benchmark": "ahead_speed", "cores": os.cpu_count()}
    with tempfile.TemporaryDirectory() as name:
        for workload in arguments.only:
            measure = measure_cpu if workload == "cpu" else partial(measure_sleeping, workload)
            found[workload] = measure(Path(name), arguments.iterations)
    print(json.dumps(found))


def measure_sleeping(workload: str, folder: Path, iterations: int) -> dict[str, Any]:
    """Return seconds per iteration, and the gain over K = 0, of devices that sleep."""
    from tests.golden.runs import SMALL

    lengths, update_s, staleness, least = SLEEPING[workload]
    plugin = folder / f"{workload.replace(' ', '_')}.py"
    plugin.write_text(f"from benchmarks.sleeping import sleep\n\nsleep({lengths}, {update_s})\n")
    keys = {
        **SMALL,
        **APART,
        "training.backend": "sleeping",
        "algorithm.old_log_probs": "recompute",
        "training.plugins": f"[{plugin}]",
        "training.global_batch_size": GROUPS,
        "training.seq_length": 8 + max(lengths),
        "training.train_iters": WARM + iterations + LAST,
        "actor_rollout.n_samples_per_prompt": GROUP_SIZE,
        "actor_rollout.max_new_tokens": max(lengths),
        "actor_rollout.ppo_epochs": 1,
        "rollout.slice_steps": min(lengths) // 2,
    }
    in_turn = run(folder, {**keys, "rollout.max_staleness": 0})
    ahead = run(folder, {**keys, "rollout.max_staleness": staleness})
    return {
        "seconds_0": round(in_turn, 2),
        f"seconds_{staleness}": round(ahead, 2),
        "gain": round(in_turn / ahead, 2),
        "least": least,
    }


def measure_cpu(folder: Path, iterations: int) -> dict[str, Any]:
    """Return response tokens per second by K."""
    from iteration import make_models, write_inputs
    from ppo_step import LENGTHS, SHAPES

    shape = SHAPES["19m"]
    make_models(folder, shape)
    write_inputs(folder, shape["vocab_size"], CPU_PROMPT)
    stored = json.loads(LENGTHS.read_text(encoding="utf-8"))["responses"]
    lengths = [max(2, length // 4) for length in stored]
    plugin = folder / "lengths.py"
    plugin.write_text(
        f"from benchmarks.sleeping import force_lengths\n\nforce_lengths({lengths})\n"
    )
    reward = folder / "reward.py"
    reward.write_text("def score(response, **_):\n    return len(response) % 7 / 7\n")
    keys = {
        **APART,
        "actor_rollout.model": "auto",
        "ref.model": "auto",
        "training.plugins": f"[{plugin}]",
        "training.global_batch_size": GROUPS,
        "training.train_iters": WARM + iterations + LAST,
        "training.seq_length": CPU_PROMPT + CPU_LIMIT,
        "training.deterministic": "false",
        "training.tokenizer_name_or_path": folder / "tokenizer",
        "actor_rollout.load": folder / "policy",
        "actor_rollout.n_samples_per_prompt": GROUP_SIZE,
        "actor_rollout.max_prompt_length": CPU_PROMPT,
        "actor_rollout.max_new_tokens": CPU_LIMIT,
        "actor_rollout.num_samples_per_step": ROWS,
        "actor_rollout.ppo_mini_batch_size": ROWS,
        "actor_rollout.micro_batch_size": 4,
        "actor_rollout.lr": 1e-6,
        "ref.load": folder / "policy",
        "data.train_files": folder / "train.jsonl",
        "data.val_files": "[]",
        "validation.interval": 0,
        "reward.functions": f"[{reward}:score]",
        "rollout.slice_steps": 16,
        "device.kind": "cpu",
    }
    tokens = sum(lengths) * ROWS / len(lengths)  # of an iteration
    found = {}
    for staleness in CPU_STALENESS:
        seconds = run(folder, {**keys, "rollout.max_staleness": staleness})
        found[f"tokens_per_s_{staleness}"] = round(tokens / seconds)
    return found


def run(folder: Path, keys: dict[str, Any]) -> float:
    """Train in another process; return the median seconds of a measured iteration."""
    out = tempfile.mkdtemp(dir=folder)
    given = {name: str(value) for name, value in {**keys, "training.output_dir": out}.items()}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local"}
    command = [sys.executable, "-W", "ignore", __file__, "--child", json.dumps(given)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    ends: list[float] = json.loads(done.stdout.splitlines()[-1])
    measured = ends[WARM - 1 : -LAST]
    print(f"max_staleness {keys['rollout.max_staleness']}: {ends}", file=sys.stderr)
    together = max(keys["rollout.max_staleness"], 1)  # iterations that may end in one burst
    pairs = zip(measured, measured[together:], strict=False)
    return statistics.median((end - start) / together for start, end in pairs)


def seconds_of(keys: dict[str, str]) -> list[float]:
    """Train; return the time at the end of each iteration, seconds."""
    from mindspeed_rlxf.checkpoint.directory import RunDirectory
    from mindspeed_rlxf.cluster.ray.runtime import RayRuntime
    from mindspeed_rlxf.config.compose import compose
    from mindspeed_rlxf.config.load import resolve
    from mindspeed_rlxf.trainer.preflight import prepare
    from mindspeed_rlxf.trainer.run import training

    tree = compose("grpo_trainer_tiny", [f"{key}={value}" for key, value in keys.items()])
    config = resolve(tree, "ahead_speed")
    prepared = prepare(config)
    directory = RunDirectory.create(config)
    ends: list[float] = []
    runtime = RayRuntime.from_config(config, directory.logs, directory.mark)
    try:
        with training(config, prepared, directory, runtime) as trainer:
            trainer.hooks.append(lambda _: ends.append(round(time.monotonic(), 2)))
            trainer.fit()
    finally:
        runtime.shutdown()
        directory.unlock()
    return ends


if __name__ == "__main__":
    main()
