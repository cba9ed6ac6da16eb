"""Make the tiny task's data, tokenizer and policy, and on request a reward model.

    python examples/tiny/make.py --output outputs/tiny --seed 1 [--reward-model]

Files with the same seed and VERSION are kept; otherwise the output folder is replaced.
Configurations with `reward.kind: model` (`ppo_trainer_tiny_rm`) need the reward model, which takes
longer than all the rest.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # waiting threads must not use the cores

import torch
from tiny_task import Split, make_once, make_split, make_tokenizer
from train_models import pretrain_policy, train_reward_model
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

VERSION = 3  # to be raised when data or models change
POLICY, REWARD = "sft", "rm"


def main(argv: list[str] | None = None) -> None:
    """Make what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("outputs/tiny"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--reward-model", action="store_true", help="make models/rm too")
    arguments = parser.parse_args(argv)
    transformers_logging.disable_progress_bar()
    output: Path = arguments.output
    make_once(output, VERSION, arguments.seed, make_policy)
    if arguments.reward_model and not (output / "models" / REWARD).exists():
        make_reward_model(output, arguments.seed)


def make_policy(output: Path, split: Split, seed: int) -> None:
    """Write tokenizer and policy; print what was made."""
    torch.set_num_threads(1)
    started = time.monotonic()
    print("policy: pretraining on sums, most without the carry; half a minute", flush=True)
    policy = pretrain_policy(split, seed)
    _save(policy.model, output / "models" / POLICY)
    parameters = sum(p.numel() for p in policy.model.parameters())
    print(
        f"policy: Llama with {parameters / 1e6:.2f} M parameters, solves {policy.accuracy:.1%} of "
        f"the validation prompts before PPO ({_since(started)}): {output}",
        flush=True,
    )


def make_reward_model(output: Path, seed: int) -> None:
    """Train a reward model, starting from the policy in `output`, and write it there."""
    torch.set_num_threads(2)  # a fixed number, because rounding depends on it
    started = time.monotonic()
    print("reward model: training on comparisons, a minute or two", flush=True)
    policy = LlamaForCausalLM.from_pretrained(output / "models" / POLICY)
    reward, accuracy = train_reward_model(policy, make_split(seed), seed)
    _save(reward, output / "models" / REWARD)
    print(
        f"reward model: right in {accuracy:.1%} of held-out comparisons ({_since(started)}): "
        f"{output}",
        flush=True,
    )


def _save(model: PreTrainedModel, folder: Path) -> None:
    """Write a model and its tokenizer to another folder and rename it, so `folder` is complete."""
    unfinished = folder.with_name(f".{folder.name}")
    model.save_pretrained(unfinished)
    make_tokenizer().save_pretrained(unfinished)
    unfinished.rename(folder)


def _since(started: float) -> str:
    return f"{time.monotonic() - started:.0f} s"


if __name__ == "__main__":
    main()
