"""Write numbers of each response token of logged samples, on the ranks that compute them.

    samples_tokens/rank_00003.jsonl
    {"iteration": 7, "sample_id": 41, "advantage": [...], "kl": [...], "value": [...]}

Each list has one number per token of `response_ids` in samples.jsonl, with four digits; null if it
is not finite. A name is absent if the run has no such number.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

ITERATION = re.compile(rb'\{"iteration": (\d+),')
NUMBERS = ("advantage", "kl", "value")


def write_tokens(
    folder: Path,
    rank: int,
    iteration: int,
    samples: Mapping[int, Mapping[str, Sequence[float]]],
) -> None:
    """Append one line per sample to the file of a rank, which no other process writes.

    Makes the folder if needed. Ends a line that a killed process left incomplete.
    samples: sample id -> name -> one number per token
    """
    if not samples:
        return
    folder.mkdir(parents=True, exist_ok=True)
    lines = b"".join(_line(iteration, *sample) for sample in samples.items())
    with open(folder / f"rank_{rank:05d}.jsonl", "ab+") as stream:
        size = stream.seek(0, os.SEEK_END)
        if size and stream.seek(size - 1) is not None and stream.read(1) != b"\n":
            lines = b"\n" + lines
        stream.write(lines)


def cut_token_files(folder: Path, iteration: int) -> None:
    """Cut the file of each rank from its first line of an iteration after `iteration` on.

    Or from an incomplete line on, if that comes earlier.
    """
    for file in token_files(folder):
        kept = 0
        with open(file, "rb+") as stream:
            for line in stream:
                found = ITERATION.match(line)
                if not line.endswith(b"\n") or (found and int(found[1]) > iteration):
                    break
                kept += len(line)
            stream.truncate(kept)


def token_files(folder: Path) -> list[Path]:
    """Return the files of all ranks in `folder`, in order of rank."""
    return sorted(folder.glob("rank_*.jsonl"))


def _line(iteration: int, sample_id: int, numbers: Mapping[str, Sequence[float]]) -> bytes:
    columns = "".join(f', "{name}": [{_join(values)}]' for name, values in numbers.items())
    return f'{{"iteration": {iteration}, "sample_id": {sample_id}{columns}}}\n'.encode("ascii")


def _join(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" if math.isfinite(value) else "null" for value in values)
