"""Append to the files of a run that have one JSON object per line; flush each line at once."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TextIO, cast

from mindspeed_rlxf.files.plain import parse_json
from mindspeed_rlxf.files.safe import PRIVATE, open_file
from mindspeed_rlxf.reporting.health import Finding
from mindspeed_rlxf.reporting.line_file import LineFile


@dataclass(frozen=True)
class Sample:
    """One generated response with its score, as a line of samples.jsonl.

    sample_id:       unique within the run
    prompt_ids:      token ids without padding
    response_ids:    token ids without padding, EOS included
    score:           of the response, before penalties
    reward_parts:    summands of the score, e.g. {"accuracy": 1.0}
    weights_version: smallest and largest number of actor updates of the weights that generated a
                     token of the response
    data_source:     of the prompt

    Only validation samples have these; None is left out of the file:
    ground_truth:    expected answer
    prompt_id:       index of the prompt among the validation prompts, from 0, always the same
    answer:          the answer for which the response votes (maj@K)
    """

    sample_id: int
    prompt: str
    response: str
    prompt_ids: list[int]
    response_ids: list[int]
    score: float
    reward_parts: dict[str, float]
    weights_version: tuple[int, int]
    data_source: str | None = None
    ground_truth: str | None = None
    prompt_id: int | None = None
    answer: str | None = None


class _JsonLines:
    """A UTF-8 file of JSON objects, one per line, without NaN and lone surrogates."""

    def __init__(self, file: Path, mode: int = PRIVATE, limit: int = 0) -> None:
        """Open the file for appending; create it if absent.

        mode: permission bits of a new file
        limit: size in bytes from which `_rotate` compresses the file; 0 = never
        """
        self._file, self._mode = LineFile(file, limit), mode
        self._stream = self._open_stream()

    def _open_stream(self) -> TextIO:
        """Open the file for appending as UTF-8, with the permission bits `mode` if it is new.

        A lone surrogate is written as `\\udXXX`. The null device can be opened too.
        """
        # A lone surrogate becomes \\udXXX, which JSON reads back as the same surrogate.
        text = {"encoding": "utf-8", "errors": "backslashreplace"}
        if self._file.path == Path(os.devnull):  # a device, which `open_file` refuses
            return open(os.devnull, "a", encoding="utf-8")
        return cast(TextIO, open_file(self._file.path, "a", self._mode, **text))

    def _append(self, record: dict[str, Any]) -> None:
        line = json.dumps(_null_non_finite(record), ensure_ascii=False, allow_nan=False)
        self._stream.write(line + "\n")
        self._stream.flush()

    def _rotate(self) -> None:
        """Compress the file and begin a new one if its size has reached the limit."""
        if self._file.rotate():
            self._stream.close()
            self._stream = self._open_stream()

    def close(self) -> None:
        self._stream.close()


class MetricsWriter(_JsonLines):
    """Appends iterations to metrics.jsonl."""

    def write(self, iteration: int, metrics: Mapping[str, float], time_s: float) -> None:
        """Append {"iteration", "metrics", "time_s"}; a metric that is not finite becomes null.

        iteration: from 1, 0 for a validation before training; time_s: seconds, by the caller's
        clock
        """
        numbers = {name: float(value) for name, value in metrics.items()}
        self._append({"iteration": iteration, "metrics": numbers, "time_s": float(time_s)})


def read_metrics(file: Path) -> Iterator[tuple[int, dict[str, float | None]]]:
    """Yield (iteration, metrics) of each readable line of metrics.jsonl, in the order of the file.

    Nothing if it is absent. A metric that was not finite is None.
    """
    if not file.exists():
        return
    for line in LineFile(file).lines():
        try:
            record = parse_json(line)
            yield int(record["iteration"]), dict(record["metrics"])
        except (ValueError, KeyError, TypeError):  # cut off by a kill, or edited
            continue


class HealthWriter(_JsonLines):
    """Appends findings (the begin or end of an illness) to health.jsonl."""

    def write(self, finding: Finding) -> None:
        """Append one line with the fields of the finding."""
        self._append(asdict(finding))


class LedgerWriter(_JsonLines):
    """Appends the prompts that each iteration used to consumed.jsonl."""

    def write(
        self, iteration: int, first_sample_id: int, samples_per_prompt: int, prompts: Sequence[int]
    ) -> None:
        """Append one line with these arguments.

        prompts: indices in the data set; the ids of their samples count up from `first_sample_id`
        """
        self._append(
            {
                "iteration": iteration,
                "first_sample_id": first_sample_id,
                "samples_per_prompt": samples_per_prompt,
                "prompts": list(prompts),
            }
        )


class SampleWriter(_JsonLines):
    """Appends samples to a file: the first `samples` of each iteration, or `all`."""

    def __init__(
        self, file: Path, samples: int | Literal["all"], file_bytes: int = 0, mode: int = PRIVATE
    ) -> None:
        """Open the file for appending.

        file_bytes: size from which the file is compressed and a new one begun; 0 = never
        """
        super().__init__(file, mode, file_bytes)
        self._samples = samples

    def num_kept(self, num_samples: int) -> int:
        """Return how many of an iteration's samples `write` keeps: the first ones."""
        return num_samples if self._samples == "all" else min(self._samples, num_samples)

    def write(self, iteration: int, samples: Sequence[Sample]) -> None:
        """Append one line per kept sample: "iteration", and its fields that are not None.

        Then compress the file if it is full.
        """
        for sample in samples[: self.num_kept(len(samples))]:
            fields = {k: v for k, v in asdict(sample).items() if v is not None}
            self._append({"iteration": iteration, **fields})
        self._rotate()


def _null_non_finite(value: Any) -> Any:
    """Return a copy with None instead of NaN and infinite numbers, also inside dictionaries.

    Lists stay as they are.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _null_non_finite(item) for name, item in value.items()}
    return value
