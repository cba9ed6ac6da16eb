"""Keep a run's prompts in a temporary file, so memory does not grow with the data set."""

import json
import os
import tempfile
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from itertools import pairwise
from typing import Any, overload

import numpy as np

from mindspeed_rlxf.data.files import as_text

STYLE = "reward_model"
STYLES = ("rule", "model")


def reward_style(extra_info: Mapping[str, Any]) -> str | None:
    """Return what scores the row, `rule` or `model`, from its `reward_model.style`, if any."""
    label = extra_info.get(STYLE)
    return label.get("style") if isinstance(label, dict) else None


@dataclass(frozen=True)
class Labels:
    """A row's fields besides the prompt; see `Prompt`."""

    ground_truth: str
    data_source: str
    extra_info: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Prompt:
    """One prompt.

    Attributes:
        index: position, from 0, over all files without dropped rows.
        text: the tokenized text (a chat after its template); decoded ids for a prompt that was
            truncated or read from an indexed data set.
        token_ids: [prompt] int64, 1 to max_prompt_length, no EOS appended.
        ground_truth: what a rule compares with, "" if the row has none.
        data_source: selects the rule and names the validation metrics.
        extra_info: the row's other values for reward functions: text, numbers, lists, objects.
        messages: the chat before its template, where a reward reads it; [] = text, or not kept.
    """

    index: int
    text: str
    token_ids: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    ground_truth: str
    data_source: str
    extra_info: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)


class PromptStore(Sequence[Prompt]):
    """Prompts in insertion order.

    They live in an unnamed file in the temporary folder (`TMPDIR`), about as large as the data set,
    which vanishes with the process.
    """

    def __init__(self) -> None:
        self._ends = array("q", [0])  # positions in the file
        self._file_ends = [0]  # number of prompts up to the end of each data file
        self._file = tempfile.TemporaryFile(prefix="rlxf-prompts-")  # noqa: SIM115

    def add(self, text: str, token_ids: Sequence[int], labels: Labels) -> None:
        """Append a prompt, readable after the next `end_file`."""
        fields = [text, list(token_ids), *astuple(labels)]
        record = json.dumps(fields, default=as_text).encode("ascii")
        self._file.write(record)
        self._ends.append(self._ends[-1] + len(record))

    def end_file(self) -> None:
        """Flush, and mark the end of a data file (or an indexed data set) for `sizes`."""
        self._file.flush()
        self._file_ends.append(len(self))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Prompts per ended file or data set, in order."""
        return tuple(end - start for start, end in pairwise(self._file_ends))

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        indices = range(len(self))[index]  # as of a list: negative ones, slices, IndexError
        if isinstance(indices, int):
            return self._read(indices)
        return [self._read(i) for i in indices]

    def _read(self, index: int) -> Prompt:
        begin, end = self._ends[index : index + 2]
        record = os.pread(self._file.fileno(), end - begin, begin)
        text, ids, *labels = json.loads(record)
        return Prompt(index, text, np.asarray(ids, dtype=np.int64), *labels)
