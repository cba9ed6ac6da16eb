"""Print what a run of a demo has learnt: validation accuracy, and samples before and after.

python examples/tiny/report.py RUN_DIRECTORY
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ACCURACY = re.compile("val/.+/pass@1")
SCORE = "critic/score/mean"
WIDTH = 50  # characters of a full bar
SHOWN = 5  # samples
NARROW = 12  # characters of a prompt that fits into the table
TAG = re.compile(r"<\|[^|]*\|>")  # of a chat template


def main() -> int:
    """Print the report; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="run directory")
    run = parser.parse_args().run
    try:
        metrics, samples = _lines(run / "metrics.jsonl"), _lines(run / "val_samples.jsonl")
    except FileNotFoundError as error:
        print(f"error: {error.filename} is missing; give the run directory", file=sys.stderr)
        return 2
    print("\n".join(["", *curve(metrics), "", *before_and_after(samples), ""]))
    print(f"report, for a browser: {run / 'report.html'}")
    return 0


def curve(metrics: list[dict[str, Any]]) -> list[str]:
    """Return a line with a bar for each validation, and a line on the training score."""
    lines = ["validation accuracy (greedy)"]
    for line in metrics:
        for accuracy in (v for name, v in line["metrics"].items() if ACCURACY.fullmatch(name)):
            bar = "#" * round(accuracy * WIDTH)
            lines.append(f"  iteration {line['iteration']:>4}  {accuracy:6.1%}  |{bar:<{WIDTH}}|")
    scores = [line["metrics"][SCORE] for line in metrics if SCORE in line["metrics"]]
    if scores:
        lines.append(f"mean training score: {scores[0]:.3f} at first, {scores[-1]:.3f} at last")
    return lines


def before_and_after(samples: list[dict[str, Any]]) -> list[str]:
    """Return prompts with their responses at the first and the last validation.

    Prompts with a higher score at the end come first. Short ones make a table.
    """
    iterations = sorted({sample["iteration"] for sample in samples})
    if len(iterations) < 2:
        return ["no samples of two validations to compare"]
    first, last = (_by_id(samples, iteration) for iteration in (iterations[0], iterations[-1]))
    improved = [i for i in first if i in last and last[i]["score"] > first[i]["score"]]
    others = [i for i in first if i in last and i not in improved]
    rows = [
        (
            find_question(first[i]["prompt"]),
            *(" ".join(TAG.sub("", side[i]["response"]).split()) for side in (first, last)),
            first[i]["ground_truth"],
        )
        for i in (improved + others)[:SHOWN]
    ]
    if all(len(row[0]) <= NARROW for row in rows):
        heads = ("sample", "before", "after", "truth")
        return [f"{a:<{NARROW}}  {b:<11}  {c:<11}  {d}" for a, b, c, d in (heads, *rows)]
    return [f"{a}\n  before  {b}\n  after   {c}\n  truth   {d}" for a, b, c, d in rows]


def find_question(prompt: str) -> str:
    """Return a prompt's last line that is longer than a role's name: the question of a chat."""
    lines = TAG.sub("\n", prompt).splitlines()
    return next((line for line in reversed(lines) if len(line) > NARROW), max(lines, key=len))


def _by_id(samples: list[dict[str, Any]], iteration: int) -> dict[int, dict[str, Any]]:
    return {s["sample_id"]: s for s in samples if s["iteration"] == iteration}


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    sys.exit(main())
