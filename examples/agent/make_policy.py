"""Make data and a policy that rarely uses its calculator, for `make demo-agent`.

    python examples/agent/make_policy.py --output outputs/agent --seed 1

A prompt is `12+34=`. Three of four sums that the policy has seen are answered at once, without the
carry, so that over half of them are right. The others call the calculator, whose result is copied:

    12+34=46              57+38=85 (wrong)          57+38=57+38?95>95
                                                          ^^^^^^ ^^^ by the environment

The results it copies are random, so it never learns to add by itself.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # waiting threads must not use the cores
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tiny"))

import torch
from tiny_task import (
    EOS_ID,
    PAD_ID,
    TOKENS,
    Problem,
    Split,
    make_once,
    make_tokenizer,
)
from torch import Tensor
from train_models import PROMPT_TOKENS, new_policy, pretrain
from transformers import LlamaForCausalLM
from transformers.utils import logging as transformers_logging

VERSION = 1  # to be raised when data or model change
CALL, RESULT = "?", ">"
ALL_TOKENS = [*TOKENS, CALL, RESULT]
ID_OF = {token: index for index, token in enumerate(ALL_TOKENS)}
CALLING = 0.25  # share of pretraining sums that call the calculator
WIDTH = PROMPT_TOKENS + 6 + 4 + 4  # ids of the longest row: prompt, call, result, answer and EOS


def main(argv: list[str] | None = None) -> None:
    """Make what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("outputs/agent"))
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(argv)
    transformers_logging.disable_progress_bar()
    make_once(arguments.output, VERSION, arguments.seed, make_policy)


def make_policy(output: Path, split: Split, seed: int) -> None:
    """Write tokenizer and policy."""
    torch.set_num_threads(1)
    started = time.monotonic()
    print("policy: pretraining on sums and calls; a minute", flush=True)
    model = pretrain_policy(split.train + split.spare, seed)
    model.save_pretrained(output / "model")
    make_tokenizer(ALL_TOKENS).save_pretrained(output / "model")
    print(f"policy: {output} ({time.monotonic() - started:.0f} s)", flush=True)


def pretrain_policy(
    problems: list[Problem], seed: int, steps: int = 350, batch_size: int = 128
) -> LlamaForCausalLM:
    """Pretrain a policy on direct answers without the carry, and on calls."""
    torch.manual_seed(seed)
    model = new_policy(len(ALL_TOKENS))
    direct = torch.stack([direct_row(p) for p in problems])
    others = torch.randperm(len(problems)).tolist()
    results = [problems[other].answer for other in others]
    calls = [call_row(p, result) for p, result in zip(problems, results, strict=True)]
    called = torch.stack([ids for ids, _ in calls])
    targets = torch.stack([target for _, target in calls])

    def draw() -> tuple[Tensor, Tensor]:
        drawn = torch.randint(len(problems), (batch_size,))
        is_call = torch.rand(batch_size, 1) < CALLING
        batch = torch.where(is_call, called[drawn], direct[drawn])
        return batch, torch.where(is_call, targets[drawn], direct[drawn])[:, PROMPT_TOKENS:]

    pretrain(model, draw, steps)
    return model


def direct_row(problem: Problem) -> Tensor:
    """Return [WIDTH] ids of a prompt with its answer without the carry, EOS and padding."""
    return _pad([*_ids(problem.prompt + problem.answer_without_carry), EOS_ID])


def call_row(problem: Problem, result: str) -> tuple[Tensor, Tensor]:
    """Return [WIDTH] ids of a call with any result, and the targets: padding for the result."""
    call = problem.prompt + problem.prompt.replace("=", CALL)
    end = len(call) + len(result) + len(RESULT)
    ids = _pad([*_ids(call + result + RESULT + result), EOS_ID])
    targets = ids.clone()
    targets[len(call) : end] = PAD_ID
    return ids, targets


def _ids(text: str) -> list[int]:
    return [ID_OF[letter] for letter in text]


def _pad(ids: list[int]) -> Tensor:
    return torch.tensor(ids + [PAD_ID] * (WIDTH - len(ids)))


if __name__ == "__main__":
    main()
