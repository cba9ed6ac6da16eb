"""Prepare HellaSwag: choose the ending of a short scene, one of four (arXiv:1905.07830).

    python examples/data_preprocess/hellaswag.py --input FOLDER --output data/hellaswag

FOLDER holds `hellaswag_train.jsonl` and `hellaswag_val.jsonl` of github.com/rowanz/hellaswag, or
the parquet files of the hub. A raw row is {activity_label, ctx_a, ctx_b, endings, label, ...}. The
prompt lists the endings by letter, and the ground truth is the letter of the right one. The
validation split becomes `test.parquet`: the labels of the test split are not public.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

from preparation import DataSet, Raw, Unusable, command, patterns, prompt_row, text_of, user

HELLASWAG = DataSet(
    name="Rowan/hellaswag",
    files={
        "train": ("hellaswag_train.jsonl", *patterns("train")),
        "test": ("hellaswag_val.jsonl", *patterns("validation"), *patterns("val")),
    },
    splits={"train": "train", "test": "validation"},
)
INSTRUCTION = "Which ending is the right one? Answer with its letter alone."
LETTERS = "ABCD"


def make_row(raw: Raw, split: str, index: int, instruction: str = INSTRUCTION) -> dict[str, Any]:
    """Make a row whose ground truth is a letter; `extra_info.choices` has the endings in order.

    Raises Unusable for a row without a label or without four endings.
    """
    endings, label = raw.get("endings"), raw.get("label")
    if not isinstance(endings, list) or len(endings) != len(LETTERS):
        raise Unusable(f"not {len(LETTERS)} endings")
    if str(label) not in map(str, range(len(LETTERS))):  # a number, or text on the hub
        raise Unusable("no label")
    choices = [clean(str(ending)) for ending in endings]
    listed = "\n".join(
        f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=True)
    )
    prompt = f"{scene(raw)}\n\n{listed}\n\n{instruction}"
    extra_info = {"split": split, "index": index, "choices": choices}
    answer = LETTERS[int(str(label))]
    return prompt_row(HELLASWAG.name, "multiple_choice", user(prompt), answer, extra_info)


def scene(raw: Raw) -> str:
    """Return the activity and the context: `ctx_a`, then `ctx_b`, which begins a new sentence."""
    parts = [text_of(raw, "ctx_a"), str(raw.get("ctx_b") or "").strip()]
    begun = " ".join(part for part in (parts[0], parts[1][:1].upper() + parts[1][1:]) if part)
    return f"{text_of(raw, 'activity_label')}: {clean(begun)}"


def clean(text: str) -> str:
    """Remove marks of WikiHow such as [title] or [step], and collapse white space."""
    text = re.sub(r"\s*\[title\]", ".", text)
    text = re.sub(r"\[[^\]]*\]", " ", text)
    text = re.sub(r"([.!?])\s*\.", r"\1", text)
    return re.sub(r"\s+", " ", text).lstrip(" .").rstrip()


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare the data set; return the exit code."""
    return command(__doc__ or "", HELLASWAG, {"": make_row}, INSTRUCTION, argv)


if __name__ == "__main__":
    sys.exit(main())
