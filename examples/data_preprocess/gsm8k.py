"""Prepare GSM8K: grade-school word problems whose answer is a number.

    python examples/data_preprocess/gsm8k.py --input FOLDER --output data/gsm8k

FOLDER holds `train.jsonl` and `test.jsonl` of github.com/openai/grade-school-math, or the parquet
files of the hub. A raw row is {question, answer}; the answer ends with `#### NUMBER`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from preparation import DataSet, Raw, Unusable, command, patterns, prompt_row, text_of, user

GSM8K = DataSet(
    name="openai/gsm8k",
    config="main",
    files={"train": patterns("train", "main"), "test": patterns("test", "main")},
    splits={"train": "train", "test": "test"},
)
INSTRUCTION = "Reason step by step, then write the answer as a number after ####."
MARK = "####"


def make_row(raw: Raw, split: str, index: int, instruction: str = INSTRUCTION) -> dict[str, Any]:
    """Make a row whose ground truth is the number after ####, without thousands separators.

    Raises Unusable if there is none.
    """
    question, solution = text_of(raw, "question"), text_of(raw, "answer")
    answer = solution.rpartition(MARK)[2].strip().replace(",", "")
    if MARK not in solution or not answer:
        raise Unusable(f"no answer after {MARK}")
    messages = user(f"{question}\n\n{instruction}" if instruction else question)
    extra_info = {"split": split, "index": index}
    return prompt_row(GSM8K.name, "math", messages, answer, extra_info)


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare the data set; return the exit code."""
    return command(__doc__ or "", GSM8K, {"": make_row}, INSTRUCTION, argv)


if __name__ == "__main__":
    sys.exit(main())
