"""Prepare HH-RLHF: dialogues that end with a better or a worse response (arXiv:2204.05862).

    python examples/data_preprocess/full_hh_rlhf.py --input FOLDER --output data/full_hh_rlhf

Writes `rl/<split>.parquet`, prompts for PPO with a reward model, and `rm/<split>.parquet`, pairs
{prompt, chosen, rejected} to train one (examples/reward_model). FOLDER holds `train.jsonl.gz` and
`test.jsonl.gz` of github.com/anthropics/hh-rlhf, in folders of its subsets or directly, or the
parquet files of the hub. A raw row is {chosen, rejected}, two whole dialogues, or
{prompt, chosen, rejected}, where the last two are the responses alone.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

from preparation import DataSet, Raw, Unusable, command, patterns, prompt_row, text_of

HH_RLHF = DataSet(
    name="Dahoas/full-hh-rlhf",
    files={
        split: (*patterns(split), f"*/{split}.jsonl.gz", f"*/{split}.jsonl", f"*_{split}.jsonl.gz")
        for split in ("train", "test")
    },
    splits={"train": "train", "test": "test"},
)
TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")
ROLES = {"Human": "user", "Assistant": "assistant"}
Messages = list[dict[str, str]]


def make_prompt_row(raw: Raw, split: str, index: int) -> dict[str, Any]:
    """Make a row for PPO, without ground truth: a reward model scores the responses."""
    messages, _, _ = read_pair(raw)
    extra_info = {"split": split, "index": index}
    return prompt_row(HH_RLHF.name, "alignment", messages, "", extra_info, style="model")


def make_pair_row(raw: Raw, split: str, index: int) -> dict[str, Any]:
    """Make a row to train a reward model. Raises Unusable if both responses are the same."""
    messages, chosen, rejected = read_pair(raw)
    if chosen == rejected:
        raise Unusable("both responses are the same")
    return {
        "data_source": HH_RLHF.name,
        "prompt": messages,
        "chosen": chosen,
        "rejected": rejected,
        "extra_info": {"split": split, "index": index},
    }


def read_pair(raw: Raw) -> tuple[Messages, str, str]:
    """Return the messages before the last response, the better response and the worse one.

    Raises Unusable if the two dialogues differ before their last response.
    """
    given = raw.get("prompt")
    start = f"{given} " if isinstance(given, str) else ""
    better, worse = (split_dialogue(start + text_of(raw, key)) for key in ("chosen", "rejected"))
    if better[:-1] != worse[:-1]:
        raise Unusable("the dialogues differ before their last turn")
    return better[:-1], better[-1]["content"], worse[-1]["content"]


def split_dialogue(text: str) -> Messages:
    """Split a dialogue at `Human:` and `Assistant:` into chat messages.

    Raises Unusable unless the two take turns, the assistant last, and no turn is empty.
    """
    before, *parts = TURN.split(text)
    names, contents = parts[::2], [content.strip() for content in parts[1::2]]
    expected = ["Human", "Assistant"] * (len(names) // 2)
    if before.strip() or names != expected or not names:
        raise Unusable("Human and Assistant do not take turns")
    if not all(contents):
        raise Unusable("an empty turn")
    return [
        {"role": ROLES[name], "content": content}
        for name, content in zip(names, contents, strict=True)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare the data set; return the exit code."""
    makers = {"rl": make_prompt_row, "rm": make_pair_row}
    return command(__doc__ or "", HH_RLHF, makers, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
