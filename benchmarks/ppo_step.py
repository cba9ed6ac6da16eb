"""Measure the seconds of a PPO iteration of this package and of TRL's PPOTrainer.

Both have the same weights: four models of one shape, fp32, sdpa, prompts of 64 tokens, responses of
up to 512, micro-batches of 4, one optimizer step of policy and critic each. `equal`: all responses
have 205 tokens; `mix`: the lengths of `rollout_lengths.json`, whose mean is 40% of the limit. The
length of each response is forced by its position in the batch. This package runs twice: with
recomputed old log-probs (a pass more than TRL makes), and with those of generation (as TRL). Each
run has a process of its own with the same number of threads; the processes take turns, and the
first iteration of each is left out. Prints one JSON line.

TRL's last release with PPO is 1.12.0: `pip install --no-deps --target FOLDER trl==1.12.0 accelerate
datasets pandas python-dateutil six dill multiprocess xxhash` leaves the environment as it is.

    python benchmarks/ppo_step.py [--trl FOLDER] [--size 19m|100m] [--batch 16] [--rounds 3]
    python benchmarks/ppo_step.py --device cuda [--micro 16] [--trl FOLDER]
"""

import argparse
import contextlib
import copy
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from iteration import ROOT, make_models, write_inputs

PROMPT, LIMIT, MICRO, EQUAL = 64, 512, 4, 205
BASE = {"num_query_groups": 2, "vocab_size": 16384, "max_position_embeddings": 2048}
SHAPES = {
    "19m": {
        **BASE, "num_layers": 8, "hidden_size": 384, "ffn_hidden_size": 1024,
        "num_attention_heads": 6,
    },
    "100m": {
        **BASE, "num_layers": 14, "hidden_size": 768, "ffn_hidden_size": 2048,
        "num_attention_heads": 12, "num_query_groups": 4,
    },
}  # fmt: skip
LENGTHS = Path(__file__).with_name("rollout_lengths.json")
OURS = ("recompute", "rollout")
TRL_SETTINGS: dict[str, Any] = {
    "temperature": 1.0, "learning_rate": 1e-6, "gradient_checkpointing": False,
    "optim": "adamw_torch", "bf16": False, "report_to": [],
    "save_strategy": "no", "logging_strategy": "no",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda", "npu"], default="cpu")
    parser.add_argument("--micro", type=int, default=MICRO, help="rows of a micro-batch")
    parser.add_argument("--size", choices=list(SHAPES), default="19m")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--iterations", type=int, default=2, help="measured iterations of each process"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--workloads", default="equal,mix")
    parser.add_argument(
        "--limit", type=int, default=LIMIT, help="most response tokens; scales all lengths"
    )
    parser.add_argument("--trl", type=Path, help="folder with trl, if the environment lacks it")
    parser.add_argument(
        "--child", nargs=3, metavar=("WHO", "WORKLOAD", "FOLDER"), help=argparse.SUPPRESS
    )
    arguments = parser.parse_args()
    if arguments.child:
        who, workload, name = arguments.child
        run = trl_seconds if who == "trl" else our_seconds
        lengths = forced_lengths(workload, arguments)
        print(json.dumps(run(who, lengths, Path(name), arguments)))
        return
    with tempfile.TemporaryDirectory() as name:
        found = race(Path(name), arguments)
    print(json.dumps(found))


def forced_lengths(workload: str, arguments: argparse.Namespace) -> list[int]:
    """Return the response tokens at each position of the batch: 2 up to the limit."""
    stored = json.loads(LENGTHS.read_text(encoding="utf-8"))["responses"]
    lengths = [EQUAL] * arguments.batch if workload == "equal" else stored[: arguments.batch]
    assert len(lengths) == arguments.batch, f"a batch has at most {len(stored)} stored lengths"
    return [max(2, length * arguments.limit // LIMIT) for length in lengths]


def race(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run TRL and this package in turn on every workload; return the median seconds and ratios."""
    import torch

    policy, _ = make_models(folder, SHAPES[arguments.size])
    write_inputs(folder, BASE["vocab_size"], PROMPT)
    found: dict[str, Any] = {
        "benchmark": "ppo_step",
        "parameters_m": round(sum(p.numel() for p in policy.parameters()) / 1e6, 1),
        "batch": arguments.batch,
        "micro_batch": arguments.micro,
        "device": arguments.device,
        "threads": arguments.threads,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }
    del policy
    for workload in arguments.workloads.split(","):
        seconds: dict[str, list[float]] = {who: [] for who in ("trl", *OURS)}
        for _ in range(arguments.rounds):
            for who, values in seconds.items():
                values += child(who, workload, folder, arguments)
        medians = {who: statistics.median(values) for who, values in seconds.items()}
        found[workload] = {
            **{f"{who}_s": round(value, 2) for who, value in medians.items()},
            **{f"trl_to_{who}": round(medians["trl"] / medians[who], 2) for who in OURS},
        }
    return found


def child(who: str, workload: str, folder: Path, arguments: argparse.Namespace) -> list[float]:
    """Train in another process; return the seconds of each iteration but the first.

    who: "trl", or this package with that value of `algorithm.old_log_probs`
    """
    keys = ("device", "micro", "batch", "iterations", "threads", "limit")
    return child_seconds(__file__, keys, arguments, who, workload, str(folder))


def child_seconds(
    script: str, keys: Sequence[str], arguments: argparse.Namespace, side: str, *words: str
) -> list[float]:
    """Run `script --child SIDE WORDS` with some arguments; return all of its seconds but the first.

    TRL's folder is on the path of the side "trl" alone.
    """
    paths = [str(ROOT), *([str(arguments.trl)] if arguments.trl and side == "trl" else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads)}
    environment["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
    given = [f"--{key}={getattr(arguments, key)}" for key in keys]
    command = [sys.executable, "-W", "ignore", script, *given, "--child", side, *words]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    seconds: list[float] = json.loads(done.stdout.splitlines()[-1])
    return seconds[1:]


def our_seconds(
    old_log_probs: str, lengths: list[int], folder: Path, arguments: argparse.Namespace
) -> list[float]:
    """Train with this package in this process; return the seconds of each iteration.

    lengths: response tokens that are forced, by position in the batch
    """
    tree = our_tree(folder, arguments)
    tree["algorithm"] = {"old_log_probs": old_log_probs}
    return seconds_of(tree, lengths, folder)


def seconds_of(tree: dict[str, Any], lengths: list[int], folder: Path) -> list[float]:
    """Train by a configuration in this process; return the seconds of each iteration.

    lengths: response tokens that are forced, by position in the batch
    """
    from dataclasses import replace

    from mindspeed_rlxf import device
    from mindspeed_rlxf.cli import train
    from mindspeed_rlxf.config.enums import DeviceKind

    out = Path(tempfile.mkdtemp(dir=folder))
    tree["training"]["output_dir"] = str(out / "run")
    (out / "ours.yaml").write_text(json.dumps(tree), encoding="utf-8")
    device.setup(DeviceKind(tree["device"]["kind"]), tree["device"]["cpu_threads"])
    from mindspeed_rlxf.roles.drawn_samples import DrawnSamples

    add = DrawnSamples.add

    def add_with_lengths(
        self: Any, prompts: Any, sampling: Any, settings: Any, seed: int, agents: Any = None
    ) -> None:
        """Add each sample with the settings of its length."""
        assert agents is None, "responses of a given length have no agent"
        assert prompts.num_rows == len(lengths), "an iteration's samples are added at once"
        for row, length in enumerate(lengths):
            forced = replace(settings, min_new_tokens=length, max_new_tokens=length)
            add(self, prompts.select([row]), sampling, forced, seed)

    DrawnSamples.add = add_with_lengths  # type: ignore[method-assign]
    code = train.main(["--config-dir", str(out), "--config-name", "ours"])
    assert code == 0, f"our run ended with {code}"
    lines = (out / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = [json.loads(line)["metrics"] for line in lines]
    mean = sum(lengths) / len(lengths)
    assert abs(metrics[-1]["response_length/mean"] - mean) < 1e-6, "the lengths are as forced"
    return [each["timing/all"] for each in metrics]


def our_tree(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the configuration of one process with four models, as a YAML tree."""
    shape = json.loads((folder / "policy" / "config.json").read_text(encoding="utf-8"))
    scorer = {"micro_batch_size": arguments.micro, "load": str(folder / "scorer")}
    policy = {"micro_batch_size": arguments.micro, "load": str(folder / "policy")}
    model = {
        "num_layers": shape["num_hidden_layers"],
        "hidden_size": shape["hidden_size"],
        "ffn_hidden_size": shape["intermediate_size"],
        "num_attention_heads": shape["num_attention_heads"],
        "num_query_groups": shape["num_key_value_heads"],
        "vocab_size": shape["vocab_size"],
        "max_position_embeddings": shape["max_position_embeddings"],
    }
    learns = {"lr": 1e-6}
    return {
        "model": {"bench": model},
        "training": {
            "model": "bench",
            "train_iters": 1 + arguments.iterations,
            "global_batch_size": arguments.batch,
            "seq_length": PROMPT + arguments.limit,
            "tokenizer_name_or_path": str(folder / "tokenizer"),
            "deterministic": False,
        },
        "actor_rollout": {
            **policy,
            **learns,
            "do_sample": True,
            "max_prompt_length": PROMPT,
            "max_new_tokens": arguments.limit,
            "ppo_mini_batch_size": arguments.batch,
        },
        "ref": policy,
        "critic": {**scorer, **learns, "critic_mini_batch_size": arguments.batch},
        "reward": {**scorer, "kind": "model"},
        "data": {"train_files": str(folder / "train.jsonl"), "shuffle": False},
        "logging": {"samples": 0},
        "device": {"kind": arguments.device, "cpu_threads": arguments.threads},
        "runtime": "local",
        "placement": dict.fromkeys(("actor_rollout", "ref", "critic", "reward"), "main"),
        "resource_pool": {"main": 1},
    }


def trl_seconds(
    _who: str, lengths: list[int], folder: Path, arguments: argparse.Namespace
) -> list[float]:
    """Train with TRL in this process; return the seconds of each iteration.

    lengths: response tokens, by position in the batch; EOS is forced as the last
    """
    import torch
    from transformers import (
        LlamaForCausalLM,
        LlamaForSequenceClassification,
        PreTrainedTokenizerFast,
    )
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    torch.set_num_threads(arguments.threads)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer", padding_side="left")
    how = {"attn_implementation": "sdpa", "dtype": torch.float32}
    policy = LlamaForCausalLM.from_pretrained(folder / "policy", **how)
    value = LlamaForSequenceClassification.from_pretrained(folder / "scorer", num_labels=1, **how)
    lines = (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in lines]
    force_lengths(policy, lengths, tokenizer.eos_token_id)
    updates = 1 + arguments.iterations
    config = PPOConfig(
        output_dir=tempfile.mkdtemp(dir=folder),
        per_device_train_batch_size=arguments.micro,
        gradient_accumulation_steps=arguments.batch // arguments.micro,
        use_cpu=arguments.device == "cpu",
        num_mini_batches=1,
        num_ppo_epochs=1,
        total_episodes=updates * arguments.batch,
        response_length=arguments.limit,
        local_rollout_forward_batch_size=arguments.batch,
        stop_token_id=tokenizer.eos_token_id,
        num_sample_generations=0,
        missing_eos_penalty=None,
        **TRL_SETTINGS,
    )
    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=policy,
        ref_model=copy.deepcopy(policy),
        reward_model=copy.deepcopy(value),
        value_model=value,
        train_dataset=[{"input_ids": ids} for ids in prompts],
    )
    return step_seconds(trainer)


def step_seconds(trainer: Any) -> list[float]:
    """Train with a trainer of TRL, its output on stderr; return the seconds of each step."""
    from transformers import TrainerCallback

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            ends.append(time.monotonic())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.monotonic())

    trainer.add_callback(Clock())
    with contextlib.redirect_stdout(sys.stderr):
        trainer.train()
    return [end - start for start, end in itertools.pairwise(ends)]


def force_lengths(policy: Any, lengths: list[int], eos: int) -> None:
    """Replace `policy.generate` by one whose responses have these lengths, by position."""
    from transformers import LogitsProcessorList

    generate = policy.generate

    def forced(*given: Any, **keys: Any) -> Any:
        start = keys["input_ids"].size(1)

        def force(ids: Any, scores: Any) -> Any:
            step = ids.size(1) - start
            scores[:, eos] = float("-inf")
            for row, length in enumerate(lengths):
                if step == length - 1:
                    scores[row] = float("-inf")
                    scores[row, eos] = 0.0
            return scores

        return generate(
            *given, **keys, logits_processor=LogitsProcessorList([force]), eos_token_id=eos
        )

    policy.generate = forced


if __name__ == "__main__":
    main()
