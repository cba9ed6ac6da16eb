"""Makes everything that the tiny demo needs, from nothing: tokenizer, data, policy, reward model.

    python examples/tiny/make.py --output outputs/tiny --seed 1

What is there for the same seed and version is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin stall a busy machine

import torch
from tiny_task import make_split, make_tokenizer, write_jsonl
from train_models import teach_policy, teach_reward_model

VERSION = 3  # raise it when what is made changes
MARKER = "made.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("outputs/tiny"))
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    marker = arguments.output / MARKER
    wanted = {"version": VERSION, "seed": arguments.seed}
    if marker.exists() and json.loads(marker.read_text(encoding="utf-8")) == wanted:
        print(f"{arguments.output} holds the tiny model and its data (seed {arguments.seed})")
        return
    shutil.rmtree(arguments.output, ignore_errors=True)
    make(arguments.output, arguments.seed)
    marker.write_text(json.dumps(wanted), encoding="utf-8")


def make(output: Path, seed: int) -> None:
    torch.set_num_threads(1)
    started = time.monotonic()
    split = make_split(seed)
    write_jsonl(output / "data" / "train.jsonl", split.train)
    write_jsonl(output / "data" / "val.jsonl", split.val)
    print(f"data: {len(split.train)} prompts, {len(split.val)} validation prompts, disjoint")
    policy = teach_policy(split, seed)
    parameters = sum(p.numel() for p in policy.model.parameters())
    print(
        f"policy: Llama with {parameters / 1e6:.2f} M parameters, supervised start solves "
        f"{policy.accuracy:.1%} of the validation prompts ({_since(started)})",
        flush=True,
    )
    torch.set_num_threads(2)  # a fixed number, since rounding depends on it
    print("reward model: learning from comparisons, a minute or two", flush=True)
    reward, accuracy = teach_reward_model(policy.model, split, seed)
    print(f"reward model: right in {accuracy:.1%} of held-out comparisons ({_since(started)})")
    tokenizer = make_tokenizer()
    for name, model in (("sft", policy.model), ("rm", reward)):
        model.save_pretrained(output / "models" / name)
        tokenizer.save_pretrained(output / "models" / name)
    print(f"made in {_since(started)}: {output}", flush=True)


def _since(started: float) -> str:
    return f"{time.monotonic() - started:.0f} s"


if __name__ == "__main__":
    main()
