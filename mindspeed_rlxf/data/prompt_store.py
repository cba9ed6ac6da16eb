"""Keep the prompts of a run in a temporary file, so that memory does not grow with the data set."""

from __future__ import annotations

import json
import os
import struct
import tempfile
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, overload

import numpy as np

from mindspeed_rlxf.config.errors import Problem, UserError

Int64Array = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

HEAD = struct.Struct("<I")  # number of token ids; they follow, then JSON
ENDS_AT_ONCE = 4096  # ends of prompts that are written together


STYLE = "reward_model"
STYLES = ("rule", "model")


def reward_style(extra_info: Mapping[str, Any]) -> str | None:
    """Return what scores the row, `rule` or `model`, by its label `reward_model.style`, if any."""
    label = extra_info.get(STYLE)
    return label.get("style") if isinstance(label, dict) else None


@dataclass(frozen=True)
class Labels:
    """The fields of a row beside its prompt; see `Prompt`."""

    ground_truth: str
    data_source: str
    extra_info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Prompt:
    """One prompt of a data set.

    index:        number of the prompt, from 0, counted over all files without dropped rows
    text:         what was tokenized (a chat after its template); of a prompt that was cut, or read
                  from an indexed data set, the decoded ids
    token_ids:    [prompt] int64, at least 1 and at most max_prompt_length, no EOS appended
    ground_truth: what a rule compares with, "" when the row has none
    data_source:  picks the rule and names the validation metrics
    extra_info:   other values of the row for reward functions: text, numbers, lists, objects
    """

    index: int
    text: str
    token_ids: Int64Array
    ground_truth: str
    data_source: str
    extra_info: dict[str, Any] = field(default_factory=dict)


class PromptStore(Sequence[Prompt]):
    """Prompts in the order in which they were added.

    They are in two unnamed files in the folder for temporary files (`TMPDIR`), about as large as
    the data set, which vanish with the process.
    """

    def __init__(self) -> None:
        self._size = self._end = 0
        self._ends = array("q")  # ends of the records that are not written to self._index yet
        self._part_ends: list[int] = []
        self._content, self._index = _open_file(), _open_file()

    def add(
        self,
        text: str,
        token_ids: Sequence[int] | Int64Array,
        labels: Labels,
    ) -> None:
        """Append a prompt, readable after the next `end_part`.

        Raises UserError when it cannot be written, such as on a full disk.
        """
        ids = np.asarray(token_ids, dtype="<i4").tobytes()
        rest = json.dumps(
            [text, labels.ground_truth, labels.data_source, labels.extra_info]
        ).encode("ascii")
        record = HEAD.pack(len(token_ids)) + ids + rest
        self._write(self._content, record)
        self._end += len(record)
        self._size += 1
        self._ends.append(self._end)
        if len(self._ends) == ENDS_AT_ONCE:
            self._write_ends()

    def end_part(self) -> None:
        """Flush the prompts and mark the end of a file or data set, which `sizes` counts.

        Raises UserError when they cannot be written, such as on a full disk.
        """
        self._write_ends()
        try:
            self._content.flush()
        except OSError as error:
            raise _no_room(error) from error
        self._part_ends.append(self._size)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of prompts of each file or data set that `end_part` has ended, in order."""
        starts = [0, *self._part_ends]
        return tuple(end - start for start, end in zip(starts, self._part_ends, strict=False))

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self._read(each) for each in range(*index.indices(self._size))]
        if not -self._size <= index < self._size:
            raise IndexError(index)
        return self._read(index % self._size)

    def _read(self, index: int) -> Prompt:
        """Read prompt `index` >= 0 from the files; `end_part` must have flushed it."""
        start, count = (8 * (index - 1), 2) if index else (0, 1)
        ends = np.frombuffer(os.pread(self._index.fileno(), 8 * count, start), "<i8")
        begin, end = (int(ends[0]), int(ends[1])) if index else (0, int(ends[0]))
        record = os.pread(self._content.fileno(), end - begin, begin)
        split = HEAD.size + 4 * HEAD.unpack_from(record)[0]
        ids = np.frombuffer(record[HEAD.size : split], "<i4").astype(np.int64)
        text, truth, source, extra_info = json.loads(record[split:])
        return Prompt(index, text, ids, truth, source, extra_info)

    def _write_ends(self) -> None:
        self._write(self._index, np.asarray(self._ends, dtype="<i8").tobytes())
        self._ends = array("q")
        try:
            self._index.flush()
        except OSError as error:
            raise _no_room(error) from error

    def _write(self, file: IO[bytes], data: bytes) -> None:
        try:
            file.write(data)
        except OSError as error:
            raise _no_room(error) from error


def _open_file() -> IO[bytes]:
    try:
        return tempfile.TemporaryFile(prefix="rlxf-prompts-")  # closed with its owner
    except OSError as error:
        raise _no_room(error) from error


def _no_room(error: OSError) -> UserError:
    rule = "must take the tokenized prompts, it cannot be written"
    reason = error.strerror or type(error).__name__
    remedy = "free space there, or set TMPDIR to another folder"
    folder = tempfile.gettempdir() if tempfile.tempdir else "the folder for temporary files"
    return UserError(Problem(folder, f"{rule}: {reason}", remedy=remedy))
