"""Measure the time of GAE over 64 responses of 32,768 tokens, beside a loop over tokens.

Inputs are fp32 and torch has one thread, as a worker has by default. `whole`: all responses have
all tokens; `lengths`: different lengths; `tools`: tokens of tools between. `..._relative_error` is
the largest distance from the loop in fp64, relative to each advantage. Prints one JSON line.

    python benchmarks/advantages.py [--rows 64] [--tokens 32768] [--threads 1] [--repeats 5]
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from mindspeed_rlxf.algorithms.advantages import estimate_gae

GAMMA, LAM = 1.0, 0.95


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    shape = arguments.rows, arguments.tokens
    generator = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(shape, generator=generator) for _ in range(2))
    lengths = torch.randint(1, shape[1] + 1, (shape[0], 1), generator=generator)
    masks = {
        "whole": torch.ones(shape, dtype=torch.bool),
        "lengths": torch.arange(shape[1]) < lengths,
        "tools": torch.rand(shape, generator=generator) < 0.7,
    }
    found: dict[str, float] = {}
    for name, mask in masks.items():
        given = rewards, values, mask, GAMMA, LAM
        for _ in range(2):
            advantages, _ = estimate_gae(*given)
        found[f"{name}_ms"] = milliseconds(lambda g=given: estimate_gae(*g), arguments.repeats)
        exact = looped_gae(rewards.double(), values.double(), *given[2:])
        error = ((advantages - exact).abs() / exact.abs().clamp(min=1e-9)).max()
        found[f"{name}_relative_error"] = float(error)
    given = rewards, values, masks["whole"], GAMMA, LAM
    found["loop_ms"] = milliseconds(lambda: looped_gae(*given), min(arguments.repeats, 3))
    facts = {"benchmark": "advantages", "rows": shape[0], "tokens": shape[1]}
    facts |= {"threads": arguments.threads, "cores": os.cpu_count() or 0}
    ratio = {"times_faster": round(found["loop_ms"] / found["whole_ms"], 1)}
    print(json.dumps({**facts, "torch": torch.__version__, **found, **ratio}))


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    """Return the median wall time of `repeats` calls of `run`, in ms."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return round(statistics.median(seconds) * 1e3, 1)


def looped_gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """Return GAE advantages [rows, tokens], computed token by token from the last one."""
    advantages = torch.zeros_like(rewards)
    following, next_values = torch.zeros_like(rewards[:, 0]), torch.zeros_like(rewards[:, 0])
    for slot in reversed(range(rewards.size(1))):
        here = mask[:, slot]
        delta = rewards[:, slot] + gamma * next_values - values[:, slot]
        following = torch.where(here, delta + gamma * lam * following, following)
        next_values = torch.where(here, values[:, slot], next_values)
        advantages[:, slot] = following
    return advantages * mask


if __name__ == "__main__":
    main()
