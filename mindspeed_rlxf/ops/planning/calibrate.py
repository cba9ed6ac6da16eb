"""Measure the costs of work on this machine by short trainings of small random models.

Each training is a process of its own (`runtime: local`) with all phases of a run: generation,
log-probs, values, a reward model, updates. The costs are fitted to the seconds of the phases and
the amounts of work that `work` counts.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_rlxf import device
from mindspeed_rlxf.config.compose import compose
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.errors import Problem, UserError
from mindspeed_rlxf.config.resolve import resolve
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.ops.planning.calibration import (
    VERSION,
    Calibration,
    MeasuredCosts,
    device_name,
    today,
    versions,
)
from mindspeed_rlxf.ops.planning.fitting import fit
from mindspeed_rlxf.ops.planning.work import Kind, iteration_work

NAME, WARM_UP, ITERATIONS = "calibration", 2, 5
LIMIT_S = 900.0
"""Longest time of one training: it takes a minute, or several on slow or busy processors."""
COMMAND = "from mindspeed_rlxf.cli import train; import sys; sys.exit(train.main(sys.argv[1:]))"
OWN_CLOCK = "import time; time.monotonic = time.perf_counter = time.process_time; "
"""One thread on a CPU is timed by what it computes, so that other programs do not count."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and of a batch to measure.

    ffn:              width of the MLP
    groups:           key-value heads
    samples:          per iteration
    prompt, response: tokens
    micro:            samples of a micro-batch
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    vocab: int
    samples: int
    prompt: int
    response: int
    micro: int

    @property
    def architecture(self) -> dict[str, int]:
        """Return the keys of the model's YAML."""
        return {
            "num_layers": self.layers,
            "hidden_size": self.hidden,
            "ffn_hidden_size": self.ffn,
            "num_attention_heads": self.heads,
            "num_query_groups": self.groups,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.prompt + self.response,
        }


SHAPES = {
    DeviceKind.CPU: (
        Shape(4, 256, 768, 4, 2, 512, 16, 32, 32, 1),
        Shape(2, 512, 1536, 8, 8, 2048, 16, 32, 64, 4),
        Shape(8, 192, 512, 4, 4, 1024, 32, 64, 32, 8),
        Shape(3, 384, 1024, 6, 2, 4096, 8, 32, 96, 2),
    )
}
ON_DEVICES = (
    Shape(8, 1024, 2816, 16, 8, 4096, 64, 128, 128, 2),
    Shape(4, 2048, 5632, 16, 16, 16384, 64, 256, 256, 16),
    Shape(16, 1536, 4096, 12, 4, 32768, 32, 512, 128, 8),
    Shape(8, 3072, 8192, 24, 8, 32768, 64, 128, 512, 8),
)
"""Shapes for accelerators: large enough to fill one, small enough for 32 GB."""


@dataclass(frozen=True)
class Measured:
    """A run's configuration, and seconds by phase and of a whole iteration (`all`)."""

    config: RunConfig
    seconds: dict[str, float]


def calibrate(kind: DeviceKind, threads: int, note: Callable[[str], None]) -> Calibration:
    """Measure this host's first device by one training per shape, in turn; fit the costs.

    note: called with a line of progress before each model
    Takes minutes. Raises UserError if a training fails or takes over LIMIT_S.
    """
    kind = device.resolve_kind(kind)
    shapes = SHAPES.get(kind, ON_DEVICES)
    measured = []
    for number, shape in enumerate(shapes, 1):
        note(f"calibration: model {number} of {len(shapes)}")
        measured.append(measure(shape, kind, threads))
    return fit_costs(measured, kind, threads)


def fit_costs(measured: Sequence[Measured], kind: DeviceKind, threads: int) -> Calibration:
    """Fit the costs of each kind of work to the measured phases; return them as a calibration.

    The cost of a start of generation is 0. The calibration also has the largest relative error of a
    phase, and the seconds of an iteration outside all phases: the median of the runs.
    """
    costs, worst = {}, 0.0
    for each in Kind:
        rows, seconds = _work_and_seconds(measured, each)
        # Generation makes so many calls that the time of one start cannot be measured.
        columns = 3 if each is Kind.GENERATE else 4
        found, error = fit(rows[:, :columns], seconds)
        flop, moved, call, start = (*found, 0.0)[:4]
        costs[each.value] = MeasuredCosts(flop=flop, moved=moved, call=call, start=start)
        worst = max(worst, error)
    torch, megatron = versions()
    return Calibration(
        version=VERSION,
        kind=kind,
        device=device_name(kind) or kind.value,
        threads=threads,
        bf16=kind is not DeviceKind.CPU,
        torch=torch,
        megatron=megatron,
        date=today(),
        costs=costs,
        iteration_s=statistics.median(_outside_phases(run) for run in measured),
        worst=worst,
    )


def _work_and_seconds(measured: Sequence[Measured], kind: Kind) -> tuple[np.ndarray, np.ndarray]:
    """Return amounts of work [phases, 4] and seconds [phases] of all phases of a kind.

    The columns are FLOP, bytes moved, calls and 1 (the start of a phase).
    """
    rows, seconds = [], []
    for run in measured:
        for phase in iteration_work(run.config):
            if phase.kind is kind:
                work = phase.work
                rows.append([work.flop, work.moved, work.calls, 1.0])
                seconds.append(run.seconds[phase.name])
    return np.array(rows), np.array(seconds)


def _outside_phases(run: Measured) -> float:
    """Return the seconds of an iteration that no phase accounts for, at least 0."""
    phases = sum(run.seconds[phase.name] for phase in iteration_work(run.config))
    return max(0.0, run.seconds["all"] - phases)


def measure(shape: Shape, kind: DeviceKind, threads: int) -> Measured:
    """Train a random model of this shape in a process; return the medians of its phases' seconds.

    The first WARM_UP iterations are left out; files lie in a temporary folder. Raises UserError if
    the training fails or takes over LIMIT_S.
    """
    with tempfile.TemporaryDirectory(prefix="rlxf-calibration-") as name:
        folder = Path(name)
        _write_models(folder, shape)
        _write_prompts(folder, shape)
        tree = _configuration(folder, shape, kind, threads)
        # JSON is YAML.
        (folder / f"{NAME}.yaml").write_text(json.dumps(tree), encoding="utf-8")
        own_clock = kind is DeviceKind.CPU and threads == 1
        _run_training(folder, OWN_CLOCK if own_clock else "")
        text = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8")
        config = resolve(compose(NAME, config_dir=folder), NAME)
    lines = [json.loads(line)["metrics"] for line in text.splitlines()][WARM_UP:]
    found = {
        key.removeprefix("timing/"): statistics.median(line[key] for line in lines)
        for key in lines[0]
        if key.startswith("timing/")
    }
    return Measured(config, found)


def _run_training(folder: Path, before: str) -> None:
    """Run the training of `folder` in a process, and wait for it.

    before: Python code that the process runs first
    Raises UserError if it fails, or does not end within LIMIT_S.
    """
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    environment.pop("WORLD_SIZE", None)
    arguments = ["--config-dir", str(folder), "--config-name", NAME]
    command = [sys.executable, "-c", before + COMMAND, *arguments]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        raise _failed(f"a short training did not end in {LIMIT_S:g} s") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        raise _failed(f"a short training ended with {done.returncode}: {lines[-1]}")


def _failed(rule: str) -> UserError:
    return UserError(Problem("--calibrate", rule, remedy="see `mindspeed-rlxf doctor`", colon=True))


def _write_models(folder: Path, shape: Shape) -> None:
    """Write two Llama models without tokenizers: folder/policy, and folder/scorer with one label.

    Their weights are random, but the same in every call: sets torch's seed to 0.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    config = LlamaConfig(
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.groups,
        vocab_size=shape.vocab,
        max_position_embeddings=shape.prompt + shape.response,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        pad_token_id=0,
        eos_token_id=1,
        num_labels=1,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder / "policy")
    LlamaForSequenceClassification(config).save_pretrained(folder / "scorer")


def _write_prompts(folder: Path, shape: Shape) -> None:
    """Write random prompts, in which each word is one token, and a tokenizer of these words.

    Makes folder/train.jsonl, with 4 * shape.samples prompts, and folder/tokenizer.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", *(f"w{i}" for i in range(shape.vocab - 2))]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    tokenizer.save_pretrained(folder / "tokenizer")
    rng = np.random.default_rng(0)
    rows = (
        {"prompt": " ".join(words[i] for i in ids), "ground_truth": "", "data_source": "random"}
        for ids in rng.integers(2, shape.vocab, (4 * shape.samples, shape.prompt)).tolist()
    )
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    (folder / "train.jsonl").write_text(text, encoding="utf-8")


def _configuration(folder: Path, shape: Shape, kind: DeviceKind, threads: int) -> dict[str, Any]:
    """Return the configuration of a measured training: PPO with four models in one process."""
    half = max(1, shape.samples // 2)
    role = {"micro_batch_size": shape.micro, "load": str(folder / "scorer")}
    policy = {**role, "load": str(folder / "policy")}
    roles = ("actor_rollout", "ref", "critic", "reward")
    return {
        "model": {NAME: shape.architecture},
        "training": {
            "model": NAME,
            "train_iters": ITERATIONS,
            "bf16": kind is not DeviceKind.CPU,
            "global_batch_size": shape.samples,
            "seq_length": shape.prompt + shape.response,
            "tokenizer_name_or_path": str(folder / "tokenizer"),
            "output_dir": str(folder / "run"),
            "save_interval_s": 0,
        },
        "actor_rollout": {
            **policy,
            "do_sample": True,
            "min_new_tokens": shape.response,
            "max_prompt_length": shape.prompt,
            "max_new_tokens": shape.response,
            "ppo_mini_batch_size": half,
        },
        "ref": policy,
        "critic": {**role, "critic_mini_batch_size": half},
        "reward": {**role, "kind": "model"},
        "data": {"train_files": str(folder / "train.jsonl")},
        "device": {"kind": kind.value, "cpu_threads": threads},
        "runtime": "local",
        "placement": dict.fromkeys(roles, "main"),
        "resource_pool": {"main": 1},
    }
