"""Write numbers of each response token of logged samples, on the ranks that compute them.

    samples_tokens/rank_00003.jsonl[.N.gz]
    {"iteration": 7, "sample_id": 41, "advantage": [...], "kl": [...], "value": [...]}

Each list has one number per token of `response_ids` in samples.jsonl, with four digits; null if it
is not finite. A name is absent if the run has no such number.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mindspeed_rlxf.files.safe import PRIVATE, make_private_folder, open_file
from mindspeed_rlxf.reporting.line_file import LineFile

ITERATION = re.compile(rb'\{"iteration": (\d+),')
FILE = re.compile(r"(rank_\d+\.jsonl)(?:\.\d+(?:\.gz)?)?")
NUMBERS = ("advantage", "kl", "value")


class TokenWriter:
    """Appends to the file of one rank, which no other process writes."""

    def __init__(self, folder: Path, rank: int, limit: int = 0, mode: int = PRIVATE) -> None:
        """folder: made by the first `write`; mode: permission bits
        limit: bytes from which a file is compressed, 0 = never
        """
        self._folder, self._mode = folder, mode
        self._file = LineFile(folder / f"rank_{rank:05d}.jsonl", limit)

    def write(self, iteration: int, samples: Mapping[int, Mapping[str, Sequence[float]]]) -> None:
        """Append one line per sample; then compress the file if it is full.

        Makes the folder if needed. Ends a line that a killed process left incomplete. Does nothing
        without samples.
        samples: sample id -> name -> one number per token
        """
        if not samples:
            return
        if not self._folder.is_dir():
            make_private_folder(self._folder, self._mode)
        lines = b"".join(_line(iteration, *sample) for sample in samples.items())
        with open_file(self._file.path, "ab+", self._mode) as stream:
            size = stream.seek(0, os.SEEK_END)
            if size and stream.seek(size - 1) is not None and stream.read(1) != b"\n":
                lines = b"\n" + lines  # a killed process left a part of a line
            stream.write(lines)
        self._file.rotate()


def cut_token_files(folder: Path, iteration: int) -> None:
    """Cut the file of each rank from its first line of an iteration after `iteration` on.

    Or from an incomplete line on, if that comes earlier. A file that cannot be read up to that line
    stays uncut, without an error: readers use the last line of each sample.
    """
    for file in token_files(folder):
        kept = 0
        with contextlib.suppress(OSError, EOFError, ValueError, zlib.error):
            for line in file.lines():
                found = ITERATION.match(line)
                if not line.endswith(b"\n") or (found and int(found[1]) > iteration):
                    break
                kept += len(line)
            file.cut(kept)


def token_files(folder: Path) -> Iterator[LineFile]:
    """Yield the files of all ranks in `folder`, in order of rank; nothing if there are none."""
    names = {m[1] for file in folder.glob("rank_*") if (m := FILE.fullmatch(file.name))}
    yield from (LineFile(folder / name) for name in sorted(names))


def _line(iteration: int, sample_id: int, numbers: Mapping[str, Sequence[float]]) -> bytes:
    columns = "".join(f', "{name}": [{_join(values)}]' for name, values in numbers.items())
    return f'{{"iteration": {iteration}, "sample_id": {sample_id}{columns}}}\n'.encode("ascii")


def _join(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" if math.isfinite(value) else "null" for value in values)
