"""Prepare MATH: competition problems whose answer is a LaTeX expression (arXiv:2103.03874).

    python examples/data_preprocess/math_dataset.py --input FOLDER --output data/math

FOLDER holds `train/SUBJECT/NUMBER.json` and `test/...` of the authors' archive, or the parquet
files of the hub. A raw row is {problem, solution, level, type}; the answer is in the solution's
last \\boxed{}.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

from preparation import DataSet, Raw, Unusable, command, patterns, prompt_row, text_of, user

from mindspeed_rlxf.rewards.verifiers import find_boxed

MATH = DataSet(
    name="DigitalLearningGmbH/MATH-lighteval",
    config="default",
    files={split: (f"{split}/*/*.json", *patterns(split)) for split in ("train", "test")},
    splits={"train": "train", "test": "test"},
)
INSTRUCTION = "Reason step by step and put the final answer in \\boxed{}."
BARE_BOX = re.compile(r"\\boxed ([^\s$]+)")  # some solutions write \boxed 5


def make_row(raw: Raw, split: str, index: int, instruction: str = INSTRUCTION) -> dict[str, Any]:
    """Make a row whose ground truth is the LaTeX of the answer. Raises Unusable without one."""
    problem, solution = text_of(raw, "problem"), text_of(raw, "solution")
    answer = find_answer(solution)
    if not answer:
        raise Unusable("no answer in \\boxed{}")
    messages = user(f"{problem}\n\n{instruction}" if instruction else problem)
    extra_info = {"split": split, "index": index}
    extra_info |= {key: str(raw.get(key) or "") for key in ("level", "type")}
    return prompt_row(MATH.name, "math", messages, answer, extra_info)


def find_answer(solution: str) -> str:
    """Return the content of the last \\boxed{} or \\fbox{} of a solution, "" without one."""
    solution = solution.replace("\\fbox{", "\\boxed{")
    bare = BARE_BOX.findall(solution)
    return (find_boxed(solution) or (bare[-1] if bare else "")).strip()


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare the data set; return the exit code."""
    return command(__doc__ or "", MATH, {"": make_row}, INSTRUCTION, argv)


if __name__ == "__main__":
    sys.exit(main())
