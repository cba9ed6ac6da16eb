"""Measure whether rewards are computed while responses are still generated, or the time of rules.

Generation is a stub: 64 responses, finished at equal distances over 20 s. The reward function
sleeps for 1 s, in 8 processes. An iteration should take no longer than generation and the reward of
the last response, and 10% for everything else (`bound_s`); rewards one after the other would take
64 s more. Prints one JSON line.

    python benchmarks/rewards.py [--generation 20] [--reward 1] [--workers 8] [--samples 64]

With --rules: the CPU time of each rule for 1,000 responses, milliseconds, the best of five runs;
with --old FOLDER also that of another checkout, run in turns, and the ratio.

    python benchmarks/rewards.py --rules [--old FOLDER]
"""

import argparse
import json
import os
import subprocess
import sys
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
ROUNDS = 4
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
RULE_TIMES = r"""
import json, random, time
from mindspeed_rlxf.rewards.rules import RULES
import mindspeed_rlxf.rewards.programs as programs

draw = random.Random(1)
STEP = "First, there are {0} boxes of {1} eggs each, so that is {0} * {1} = {2} eggs in all.\n"

def solution(end, answer):
    steps = []
    for _ in range(draw.randint(3, 12)):
        a, b = draw.randint(2, 90), draw.randint(2, 90)
        steps.append(STEP.format(a, b, a * b))
    return "".join(steps) + end.format(answer)

def responses(ends, answers):
    rows = []
    for number in range(1000):
        truth = answers[number % len(answers)]
        answer = truth if number % 3 else answers[(number + 1) % len(answers)]
        rows.append((solution(ends[number % len(ends)], answer), truth))
    return rows

numbers = [str(draw.randint(1, 99999)) for _ in range(97)]
numeric = responses(["#### {}", r"The answer is $\boxed{{{}}}$.", "So she has {} eggs."], numbers)
latex = [
    "12", "-7", r"\frac{3}{4}", r"2\sqrt{3}", "x^2+1", "(1, 2)", r"\frac{\pi}{2}", "0.25", "1,024",
    r"\text{Evelyn}", r"10\text{ cm}", r"90^\circ", r"[0, 1)", "x=5", r"3+4i", r"\frac{x+1}{y}",
]
boxed = responses([r"The answer is $\boxed{{{}}}$."], latex)
prose = responses(["So the answer is ${}$.", "The final answer is ${}$. I hope so."], latex)
letters = responses(["The answer is ({}).", r"\boxed{{{}}}", "Answer: {}", "#### {}"], list("ABCD"))
cases = json.dumps({"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]})
blocks = responses(["```python\nprint({})\n```\nThat is all."], numbers)
blocks = [(response, cases) for response, _ in blocks]
programs.SHARED.count_passed = lambda program, cases: 1  # without the time of the sandbox
KINDS = {
    "exact_match": numeric, "gsm8k": numeric, "gsm8k_strict": numeric, "gsm8k_flexible": numeric,
    "gsm8k_verl": numeric, "math (boxed)": boxed, "math (prose)": prose, "math_verl": boxed,
    "multiple_choice": letters, "format": numeric, "length": numeric, "code": blocks,
}
times = {}
for kind, rows in KINDS.items():
    rule = RULES.get(kind.partition(" ")[0])
    if rule is None:
        continue
    for row in rows[:20]:  # imports
        rule(*row)
    started = time.process_time()
    for row in rows:
        rule(*row)
    times[kind] = 1e3 * (time.process_time() - started)
print(json.dumps(times))
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
    parser.add_argument("--rules", action="store_true")
    parser.add_argument("--old", type=Path)
    arguments = parser.parse_args()
    if arguments.rules:
        compare_rules(arguments.old)
        return
    del arguments.rules, arguments.old
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


def compare_rules(old: Path | None) -> None:
    """Print a line for each rule: its CPU time for 1,000 responses here and in the folder `old`."""
    folders = {"new": Path(__file__).resolve().parents[1]} | ({"old": old} if old else {})
    best: dict[str, dict[str, float]] = {}
    for _ in range(ROUNDS):
        for name, folder in folders.items():
            environment = {**os.environ, "PYTHONPATH": str(folder)}
            command = [sys.executable, "-W", "ignore", "-c", RULE_TIMES]
            printed = subprocess.check_output(command, env=environment, cwd=folder, text=True)
            for kind, milliseconds in json.loads(printed).items():
                times = best.setdefault(kind, {})
                times[name] = min(milliseconds, times.get(name, milliseconds))
    for kind, times in best.items():
        report = {"rule": kind, **{f"{name}_ms": round(ms, 1) for name, ms in times.items()}}
        if "old" in times:
            report["ratio"] = round(times["new"] / times["old"], 2)
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
