"""Draw the accuracy of runs on the test questions, a panel for each algorithm.

    python examples/smollm2/draw.py docs/smollm2.png RUN_DIRECTORY ...

Needs matplotlib (the extra `docs`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib as mpl
import yaml

mpl.use("Agg")
from matplotlib import pyplot

ACCURACY = "val/word_sums/pass@1"
TITLES = {"ray_grpo": "GRPO", "ray_ppo": "PPO"}


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("output", type=Path, help="picture to write")
    parser.add_argument("runs", type=Path, nargs="+", help="run directories")
    arguments = parser.parse_args()
    panels: dict[str, list[tuple[int, Path]]] = {}
    for run in arguments.runs:
        training = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))["training"]
        panels.setdefault(TITLES[training["stage"]], []).append((training["seed"], run))
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(5.5 * len(panels), 3.5), sharey=True, squeeze=False
    )
    for axis, (title, runs) in zip(axes[0], sorted(panels.items()), strict=True):
        for color, (seed, run) in enumerate(sorted(runs)):
            lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            metrics = {line["iteration"]: line["metrics"] for line in map(json.loads, lines)}
            points = [
                (i, 100 * values[ACCURACY])
                for i, values in sorted(metrics.items())
                if ACCURACY in values
            ]
            axis.plot(
                *zip(*points, strict=True), color=f"C{color}", marker="o", label=f"seed {seed}"
            )
        axis.set(title=title, xlabel="iteration", ylim=(0, 100))
        axis.legend(loc="lower right")
    axes[0][0].set_ylabel("accuracy, %")
    figure.tight_layout()
    figure.savefig(arguments.output, dpi=90)


if __name__ == "__main__":
    main()
