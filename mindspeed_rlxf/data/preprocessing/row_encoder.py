"""A chunk of rows becomes what is written of it: token ids, labels, other columns, rejects."""

from __future__ import annotations

import base64
import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mindspeed_rlxf.config.enums import OverlongPrompts
from mindspeed_rlxf.config.errors import Problem
from mindspeed_rlxf.data.conversation import UnusableRow
from mindspeed_rlxf.data.files import BadRow, Row, fault
from mindspeed_rlxf.data.handlers import LABELS, Handler, Output
from mindspeed_rlxf.data.lengths import CUTTING, cut, most_characters
from mindspeed_rlxf.data.preprocessing.examples import Example, example_of
from mindspeed_rlxf.data.preprocessing.map_keys import Keys
from mindspeed_rlxf.data.prompt_encoder import IGNORED, PromptEncoder
from mindspeed_rlxf.data.sidecar import TOKEN_IDS
from mindspeed_rlxf.data.templates import Turn

TOO_LONG = "too long"
MAX_RAW = 2000  # characters of a rejected row that are kept


@dataclass(frozen=True)
class NumberedRow:
    """row: from 1, in its file."""

    file: str
    number: int
    row: Row | BadRow


@dataclass(frozen=True)
class Rejected:
    """A row that is not written, and why."""

    file: str
    row: int
    reason: str
    problem: Problem
    raw: str


@dataclass
class Sequences:
    """One column: int32 bytes of all rows behind each other, `lengths` [rows] in tokens."""

    items: bytes = b""
    lengths: list[int] = field(default_factory=list)


@dataclass
class EncodedChunk:
    """sequences:   name -> token ids or labels of the rows
    columns:     name -> JSON bytes [rows]; None where the row lacks the column
    num_unknown: tokens that stand for what the tokenizer does not know, of `num_tokens`
    """

    num_rows: int = 0
    sequences: dict[str, Sequences] = field(default_factory=dict)
    columns: dict[str, list[bytes | None]] = field(default_factory=dict)
    rejected: list[Rejected] = field(default_factory=list)
    num_cut: int = 0
    num_unknown: int = 0
    num_tokens: int = 0


IdRows = tuple[list[int], ...]
"""Of one row, a list of ids for each of the handler's sequences."""


@dataclass(frozen=True)
class RowEncoder:
    """max_length:   longest sequence in tokens, None = any; `overlong` says what becomes of others
    kept_columns: of the rows' other columns, None = all
    end_id:       put behind a conversation that does not end with it, None = nothing
    unknown_id:   the tokenizer's, None = it has none
    """

    prompts: PromptEncoder
    keys: Keys
    handler: Handler
    max_length: int | None
    overlong: OverlongPrompts
    kept_columns: frozenset[str] | None = None
    end_id: int | None = None
    unknown_id: int | None = None

    def encode(self, rows: Sequence[NumberedRow]) -> EncodedChunk:
        chunk, usable, examples = EncodedChunk(), [], []
        for row in rows:
            example = self._example(row, chunk.rejected)
            if example is not None:
                usable.append(row)
                examples.append(example)
        written: list[tuple[NumberedRow, Example]] = []
        kept: list[IdRows] = []
        for row, example, ids in zip(usable, examples, self._id_rows(examples), strict=True):
            fitting = self._fitting(row, ids, chunk.rejected)
            if fitting is not None:
                chunk.num_cut += len(fitting[0]) < len(ids[0])
                kept.append(fitting)
                written.append((row, example))
        self._fill(chunk, kept)
        chunk.columns = self._columns(written)
        order = {(row.file, row.number): place for place, row in enumerate(rows)}
        chunk.rejected.sort(key=lambda reject: order[reject.file, reject.row])
        return chunk

    def _example(self, row: NumberedRow, rejected: list[Rejected]) -> Example | None:
        if isinstance(row.row, BadRow):
            rejected.append(_rejected(row, row.row.reason, row.row.problem))
            return None
        try:
            example = example_of(row.row, self.keys, self.handler)
        except UnusableRow as error:
            rejected.append(_rejected(row, error.reason, error.problem))
            return None
        if self.max_length is None or self.overlong in CUTTING:
            return example
        length = sum(len(turn.text) for turn in example.turns)
        if length > most_characters(self.max_length):  # not worth tokenizing
            rejected.append(self._too_long(row, f"{length} characters", bool(example.responses)))
            return None
        return example

    def _id_rows(self, examples: Sequence[Example]) -> list[IdRows]:
        if not self.handler.has_responses:
            return [(ids,) for ids in self.prompts.encode([e.turns for e in examples])]
        conversations = [
            [*example.turns, Turn("assistant", response)]
            for example in examples
            for response in example.responses
        ]
        labelled = self.prompts.encode_labelled(conversations)
        if self.handler.output is Output.PAIR:
            judged = [(found.token_ids, last_response_only(found.labels)) for found in labelled]
            return [(*judged[i], *judged[i + 1]) for i in range(0, len(judged), 2)]
        for found in labelled:
            if self.end_id is not None and found.token_ids[-1:] != [self.end_id]:
                found.token_ids.append(self.end_id)
                found.labels.append(self.end_id)
        return [(found.token_ids, found.labels) for found in labelled]

    def _fitting(self, row: NumberedRow, ids: IdRows, rejected: list[Rejected]) -> IdRows | None:
        if not all(ids):
            rejected.append(
                _rejected(
                    row,
                    "no token",
                    fault(
                        "a prompt must have a token, the tokenizer makes none of this one",
                        "remove the row",
                    ),
                )
            )
            return None
        longest = max(map(len, ids))
        if self.max_length is None or longest <= self.max_length:
            return ids
        kept = None if len(ids) > 1 else cut(ids[0], self.max_length, self.overlong)
        if kept is None:
            rejected.append(self._too_long(row, f"{longest} tokens", len(ids) > 1))
            return None
        return (kept,)

    def _too_long(self, row: NumberedRow, length: str, is_conversation: bool) -> Rejected:
        name, remedy = "prompt", "raise it or use --overlong keep-tail"
        if is_conversation:
            name, remedy = "conversation", "raise it"
        rule = f"a {name} must fit --seq-length={self.max_length}, this one has {length}"
        return _rejected(row, TOO_LONG, fault(rule, remedy))

    def _fill(self, chunk: EncodedChunk, kept: Sequence[IdRows]) -> None:
        chunk.num_rows = len(kept)
        for place, name in enumerate(self.handler.sequences):
            parts = [np.asarray(ids[place], dtype=np.int32) for ids in kept]
            items = np.concatenate(parts) if parts else np.zeros(0, np.int32)
            chunk.sequences[name] = Sequences(items.tobytes(), [len(part) for part in parts])
            if name.endswith(TOKEN_IDS):
                chunk.num_tokens += len(items)
                if self.unknown_id is not None:
                    chunk.num_unknown += int(np.count_nonzero(items == self.unknown_id))

    def _columns(
        self, rows: Sequence[tuple[NumberedRow, Example]]
    ) -> dict[str, list[bytes | None]]:
        columns: dict[str, list[bytes | None]] = {}
        consumed, kept = self.keys.consumed, self.kept_columns
        for place, (row, example) in enumerate(rows):
            assert isinstance(row.row, dict), "bad rows are rejected before"
            values = row.row
            if self.handler.output is Output.ANSWERED and example.responses:
                values = {**values, LABELS: example.responses[0]}
            for name, value in values.items():
                if name not in consumed and (kept is None or name in kept):
                    if name not in columns:
                        columns[name] = [None] * len(rows)
                    columns[name][place] = json_bytes(value)
        return columns


def last_response_only(labels: list[int]) -> list[int]:
    """Of a conversation that ends with a response: the earlier ones are ignored too."""
    start = len(labels)
    while start and labels[start - 1] != IGNORED:
        start -= 1
    return [IGNORED] * start + labels[start:]


def json_bytes(value: Any) -> bytes:
    """UTF-8 JSON. What JSON lacks and parquet has becomes text: ISO dates, base64 bytes."""
    try:
        return _UTF8_JSON.encode(value).encode("utf-8")
    except UnicodeEncodeError:  # half a character: JSON can escape it, UTF-8 has no bytes for it
        return json.dumps(value, default=_as_text).encode("ascii")


def _as_text(value: Any) -> str:
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    return base64.b64encode(value).decode("ascii") if isinstance(value, bytes) else str(value)


_UTF8_JSON = json.JSONEncoder(ensure_ascii=False, default=_as_text)


def _rejected(row: NumberedRow, reason: str, problem: Problem) -> Rejected:
    raw = row.row.raw if isinstance(row.row, BadRow) else json_bytes(row.row).decode("utf-8")
    return Rejected(row.file, row.number, reason, problem, raw[:MAX_RAW])
