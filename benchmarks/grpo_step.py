"""Measure the seconds of a GRPO iteration of this package and of TRL's GRPOTrainer.

Both have the same weights (fp32, sdpa), `--prompts` prompts of `--prompt` tokens with `--samples`
responses each, of half to one and a half of `--response` tokens, forced by position in the batch; a
cheap reward, no reference, one optimizer step, all samples of a prompt in one micro-batch. Old
log-probs are those of generation (TRL's are those of the update itself: no further pass either).
`apart` is this package with `share_prompts: false`. Each run has a process of its own with the same
number of threads; the processes take turns, and the first iteration of each is left out. Prints one
JSON line.

    python benchmarks/grpo_step.py [--trl FOLDER] [--size 19m|100m] [--rounds 2]

`ppo_step.py` says how to install TRL into a folder.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

from iteration import make_models, write_inputs
from ppo_step import (
    BASE,
    SHAPES,
    TRL_SETTINGS,
    child_seconds,
    force_lengths,
    our_tree,
    seconds_of,
    step_seconds,
)

SIDES = ("trl", "shared", "apart")
KEYS = ("size", "prompts", "samples", "prompt", "response", "iterations", "threads")
REWARD = "def score(response, **_):\n    return len(response) % 7 / 7\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=list(SHAPES), default="19m")
    for name, number in {
        "prompts": 4, "samples": 8, "prompt": 256, "response": 64, "rounds": 2, "iterations": 2,
        "threads": 2,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--trl", type=Path, help="folder with trl, if the environment lacks it")
    parser.add_argument("--child", nargs=2, metavar=("SIDE", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.batch = arguments.prompts * arguments.samples
    low, arguments.limit = arguments.response // 2, 3 * arguments.response // 2
    draw = random.Random(3)
    lengths = [draw.randint(low, arguments.limit) for _ in range(arguments.batch)]
    if arguments.child:
        side, folder = arguments.child
        run = trl_seconds if side == "trl" else our_seconds
        print(json.dumps(run(side, lengths, Path(folder), arguments)))
        return
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(race(Path(name), lengths, arguments)))


def race(folder: Path, lengths: list[int], arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all sides in turn; return their median seconds and ratios."""
    import torch

    policy, _ = make_models(folder, SHAPES[arguments.size])
    write_inputs(folder, BASE["vocab_size"], arguments.prompt)
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(arguments.rounds):
        for side, values in seconds.items():
            values += child_seconds(__file__, KEYS, arguments, side, str(folder))
    medians = {side: statistics.median(values) for side, values in seconds.items()}
    return {
        "benchmark": "grpo_step",
        "parameters_m": round(sum(p.numel() for p in policy.parameters()) / 1e6, 1),
        **{key: getattr(arguments, key) for key in ("prompts", "samples", "prompt", "response")},
        "response_tokens": sum(lengths),
        "threads": arguments.threads,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        **{f"{side}_s": round(value, 2) for side, value in medians.items()},
        **{f"{o}_to_shared": round(medians[o] / medians["shared"], 2) for o in ("trl", "apart")},
    }


def our_seconds(
    side: str, lengths: list[int], folder: Path, arguments: argparse.Namespace
) -> list[float]:
    """Train with this package in this process; return the seconds of each iteration."""
    tree = our_tree(folder, arguments)
    for role in ("ref", "critic"):
        del tree[role], tree["placement"][role]
    tree["training"] |= {
        "stage": "ray_grpo",
        "global_batch_size": arguments.prompts,
        "seq_length": arguments.prompt + arguments.limit,
    }
    tree["actor_rollout"] |= {
        "micro_batch_size": arguments.samples,
        "max_prompt_length": arguments.prompt,
        "n_samples_per_prompt": arguments.samples,
        "share_prompts": side == "shared",
    }
    tree["reward"] = {"kind": "rule", "functions": [f"{folder}/reward.py:score"]}
    tree["algorithm"] = {
        "adv_estimator": "grpo", "kl_ctrl": {"kl_coef": 0.0}, "old_log_probs": "rollout",
    }  # fmt: skip
    return seconds_of(tree, lengths, folder, arguments.threads)


def trl_seconds(
    _side: str, lengths: list[int], folder: Path, arguments: argparse.Namespace
) -> list[float]:
    """Train with TRL in this process; return the seconds of each iteration."""
    import torch
    from datasets import Dataset
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(arguments.threads)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer", padding_side="left")
    policy = LlamaForCausalLM.from_pretrained(
        folder / "policy", attn_implementation="sdpa", dtype=torch.float32
    )
    lines = (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()
    force_lengths(policy, lengths, tokenizer.eos_token_id)
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(dir=folder),
        max_steps=1 + arguments.iterations,
        per_device_train_batch_size=arguments.samples,
        gradient_accumulation_steps=arguments.prompts,
        num_generations=arguments.samples,
        max_completion_length=arguments.limit,
        beta=0.0,
        **TRL_SETTINGS,
    )
    trainer = GRPOTrainer(
        model=policy,
        reward_funcs=lambda completions, **_: [len(text) % 7 / 7 for text in completions],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": json.loads(x)["prompt"]} for x in lines]),
        processing_class=tokenizer,
    )
    return step_seconds(trainer)


if __name__ == "__main__":
    main()
