"""Write the questions for training and test, as JSON lines.

    python examples/smollm2/make_data.py --output outputs/smollm2

`train.jsonl` and `test.jsonl` have word sums, the files of `calculator` and `three_calls` the
problems for which the model has a calculator.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import word_problems
import word_sums


def main(argv: list[str] | None = None) -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("outputs/smollm2"))
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(argv)
    splits = {"": word_sums.make_split(arguments.seed)}
    for data_source in word_problems.QUESTIONS:
        splits[f"{data_source}_"] = word_problems.make_split(arguments.seed, data_source)
    arguments.output.mkdir(parents=True, exist_ok=True)
    for prefix, (train, test) in splits.items():
        for name, rows in (("train", train), ("test", test)):
            file = arguments.output / f"{prefix}{name}.jsonl"
            file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        print(f"data: {len(train)} questions, {len(test)} test questions on other numbers: {file}")


if __name__ == "__main__":
    main()
