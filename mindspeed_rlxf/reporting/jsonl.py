"""Append to and read the JSON Lines files in a run directory: metrics, samples, tokens."""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_COLUMN = 2000  # characters of a column's JSON in a sample's line


@dataclass(frozen=True)
class Sample:
    """One generated response with its score; a line in samples.jsonl.

    Token ids exclude padding; `response_ids` include EOS. `score` precedes penalties,
    `reward_parts` are its summands, `weights_version` the fewest and most actor updates behind its
    tokens' weights.

    `ground_truth` is the expected answer, and `extra_info` the other columns of the prompt's row.
    Only validation samples have `prompt_id` and `answer`: the prompt's stable index from 0, and the
    answer the response votes for (maj@K). Only conversations have `turns`, the first token and the
    end of each turn in `response_ids` (what is between them was given to the policy), and
    `agent_failure`, why it was not trained. None is not written.
    """

    sample_id: int
    prompt: str
    response: str
    prompt_ids: list[int]
    response_ids: list[int]
    score: float
    reward_parts: dict[str, float | str]
    weights_version: tuple[int, int]
    data_source: str | None = None
    ground_truth: str | None = None
    extra_info: dict[str, Any] | None = None
    prompt_id: int | None = None
    answer: str | None = None
    turns: list[tuple[int, int]] | None = None
    agent_failure: str | None = None

    def record(self, iteration: int) -> dict[str, Any]:
        """Return the line for samples.jsonl."""
        record: dict[str, Any] = {"iteration": iteration}
        for name, value in vars(self).items():
            if value is not None:
                record[name] = value
        return record


def shorten_columns(columns: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a row's columns; those longer than MAX_COLUMN as the start of their JSON.

    None if there are none.
    """
    shortened: dict[str, Any] = {}
    for name, value in columns.items():
        text = json.dumps(value, ensure_ascii=False, default=str)
        shortened[name] = value if len(text) <= MAX_COLUMN else text[:MAX_COLUMN] + "..."
    return shortened or None


class JsonlWriter:
    """Appends JSON objects to a UTF-8 file, one per line, flushing each line."""

    def __init__(self, file: Path) -> None:
        # A lone surrogate is written as \udXXX, which JSON reads back as the same surrogate.
        self._stream = file.open("a", encoding="utf-8", errors="backslashreplace")

    def write(self, record: dict[str, Any]) -> None:
        """Append one line; non-finite numbers become null, objects that JSON lacks strings."""
        finite = null_non_finite(record)
        line = json.dumps(finite, ensure_ascii=False, allow_nan=False, default=str)
        self._stream.write(line + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def metrics_record(iteration: int, metrics: dict[str, float], time_s: float) -> dict[str, Any]:
    """Return a line for metrics.jsonl; iteration 0 is a validation before training."""
    return {
        "iteration": iteration,
        "metrics": {name: float(value) for name, value in metrics.items()},
        "time_s": float(time_s),
    }


# Metric of older runs -> its name today.
RENAMED = (b'"response_length/cut_fraction"', b'"response_length/truncated_fraction"')


def read_jsonl(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in a file, oldest first; nothing if the file is absent.

    Skips anything else, such as half a line from a killed process.
    """
    if not file.exists():
        return
    with open(file, "rb") as stream:
        for line in stream:
            try:
                record = json.loads(line.replace(*RENAMED))
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                yield record


def read_metrics(file: Path) -> Iterator[tuple[int, dict[str, float | None]]]:
    """Yield (iteration, metrics) per metrics.jsonl line; None stands for a non-finite metric."""
    for record in read_jsonl(file):
        iteration = record.get("iteration")
        metrics = record.get("metrics")
        if isinstance(iteration, int) and isinstance(metrics, dict):
            yield iteration, metrics


def null_non_finite(value: Any) -> Any:
    """Return a JSON value with NaN and infinity replaced by None, nested ones included."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: null_non_finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [null_non_finite(item) for item in value]
    return value


ITERATION = re.compile(rb'\{"iteration": (\d+),')
NUMBERS = ("advantage", "kl", "value")


def write_tokens(
    folder: Path,
    rank: int,
    iteration: int,
    samples: Mapping[int, Mapping[str, Sequence[float]]],
) -> None:
    """Append one line per sample to this rank's file, which no other process writes.

    Creates the folder if needed, and ends a line left incomplete by a killed process. `samples` has
    sample id -> name -> one number per token.
    """
    if not samples:
        return
    folder.mkdir(parents=True, exist_ok=True)
    lines = b""
    for sample_id, numbers in samples.items():
        record: dict[str, Any] = {"iteration": iteration, "sample_id": sample_id}
        for name, values in numbers.items():
            record[name] = [float(f"{v:.4g}") if math.isfinite(v) else None for v in values]
        lines += json.dumps(record).encode("ascii") + b"\n"
    with open(folder / f"rank_{rank:05d}.jsonl", "ab+") as stream:
        size = stream.seek(0, os.SEEK_END)
        if size > 0:
            stream.seek(size - 1)
            if stream.read(1) != b"\n":
                lines = b"\n" + lines
        stream.write(lines)


def cut_token_files(folder: Path, iteration: int) -> None:
    """Truncate each rank's file at its first incomplete line, or first line after `iteration`."""
    for file in token_files(folder):
        num_kept_bytes = 0
        with open(file, "rb+") as stream:
            for line in stream:
                match = ITERATION.match(line)
                if not line.endswith(b"\n") or (match and int(match[1]) > iteration):
                    break
                num_kept_bytes += len(line)
            stream.truncate(num_kept_bytes)


def token_files(folder: Path) -> list[Path]:
    """Return all ranks' files in `folder`, ordered by rank."""
    return sorted(folder.glob("rank_*.jsonl"))
