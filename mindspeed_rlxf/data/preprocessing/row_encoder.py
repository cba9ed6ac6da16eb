"""Encode a chunk of rows: token ids, other columns, and the rows that are rejected."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from mindspeed_rlxf.config.enums import OverlongPrompts
from mindspeed_rlxf.config.problems import Problem
from mindspeed_rlxf.data.files import Row, UnusableRow, as_text
from mindspeed_rlxf.data.handlers import LABELS, Handler, Keys
from mindspeed_rlxf.data.preprocessing.examples import Example, make_example
from mindspeed_rlxf.data.prompts import NO_TOKEN, cut
from mindspeed_rlxf.data.templates import PromptEncoder

TOO_LONG = "too long"
MAX_RAW = 2000  # characters of a rejected row that are kept


class NumberedRow(NamedTuple):
    """A row and where it is. number: of the row in its file, from 1"""

    file: str
    number: int
    row: Row | UnusableRow


@dataclass(frozen=True)
class Rejected:
    """A row that is not written; dropped rows are counted by their reason, a short name."""

    file: str
    row: int
    reason: str
    problem: Problem
    raw: str  # text of the row in the file, at most MAX_RAW characters


@dataclass
class EncodedChunk:
    """The rows of a chunk, encoded, and those that were rejected."""

    token_ids: list[list[int]] = field(default_factory=list)  # of each row that was encoded
    # column -> JSON bytes of these rows; None if the row lacks the column
    columns: dict[str, list[bytes | None]] = field(default_factory=dict)
    rejected: list[Rejected] = field(default_factory=list)
    num_cut: int = 0  # rows whose prompt was truncated


@dataclass(frozen=True)
class RowEncoder:
    """Encodes rows with one template, handler and tokenizer."""

    prompts: PromptEncoder
    keys: Keys
    handler: Handler
    max_length: int | None  # longest prompt in tokens, None = any
    overlong: OverlongPrompts  # whether longer prompts are truncated; if not, they are rejected
    kept_columns: set[str] | None = None  # other columns of the rows to write, None = all

    def encode(self, rows: Sequence[NumberedRow]) -> EncodedChunk:
        """Encode rows; unusable ones are only listed in `rejected`, in the order of the rows."""
        chunk, errors = EncodedChunk(), dict[int, UnusableRow]()
        usable: dict[int, Example] = {}
        for i, (_, _, row) in enumerate(rows):
            try:
                if isinstance(row, UnusableRow):
                    raise row
                usable[i] = make_example(row, self.keys, self.handler)
            except UnusableRow as error:
                errors[i] = error
        encoded = self.prompts.encode([example.turns for example in usable.values()])
        written = []
        for (i, example), ids in zip(usable.items(), encoded, strict=True):
            try:
                chunk.token_ids.append(self._fit(ids))
            except UnusableRow as error:
                errors[i] = error
                continue
            chunk.num_cut += len(chunk.token_ids[-1]) < len(ids)
            written.append((cast("Row", rows[i].row), example))
        chunk.columns = self._columns(written)
        for i, found in sorted(errors.items()):
            file, number, row = rows[i]
            raw = row.raw if isinstance(row, UnusableRow) else to_json(row).decode("utf-8")
            chunk.rejected.append(
                Rejected(file, number, found.reason, found.problem, raw[:MAX_RAW])
            )
        return chunk

    def _fit(self, ids: list[int]) -> list[int]:
        """Return the ids of a prompt; one that is too long is cut if the policy cuts prompts."""
        if not ids:
            raise UnusableRow("no token", NO_TOKEN, "remove the row")
        if self.max_length is None or len(ids) <= self.max_length:
            return ids
        kept = cut(ids, self.max_length, self.overlong)
        if kept is None:
            rule = (
                f"a prompt must fit --seq-length={self.max_length}, this one has {len(ids)} tokens"
            )
            raise UnusableRow(TOO_LONG, rule, "raise it or use --overlong keep-tail")
        return kept

    def _columns(self, rows: Sequence[tuple[Row, Example]]) -> dict[str, list[bytes | None]]:
        """Return name -> JSON bytes of each row for the columns to write beside the tokens.

        Columns that became the prompt are not written. Answers are column LABELS, in place of a
        column LABELS of the row.
        """
        columns: dict[str, list[bytes | None]] = {}
        parts = ("prompt", "query", "history", "system", "messages")
        consumed, kept = {getattr(self.keys, part, None) for part in parts}, self.kept_columns
        for i, (values, example) in enumerate(rows):
            if example.answer is not None:
                values = {**values, LABELS: example.answer}
            for name, value in values.items():
                if name not in consumed and (kept is None or name in kept):
                    columns.setdefault(name, [None] * len(rows))[i] = to_json(value)
        return columns


def to_json(value: Any) -> bytes:
    """Encode a value as UTF-8 JSON; values that JSON lacks become text (`as_text`)."""
    text = json.dumps(value, ensure_ascii=False, default=as_text)
    return text.encode("utf-8", "backslashreplace")  # half a surrogate pair becomes its escape
