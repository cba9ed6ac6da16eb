"""Encode a chunk of rows: token ids, other columns, and rejected rows."""

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
MAX_RAW = 2000  # characters kept from a rejected row


class NumberedRow(NamedTuple):
    """A row, its file, and its number in the file, from 1."""

    file: str
    number: int
    row: Row | UnusableRow


@dataclass(frozen=True)
class Rejected:
    """A row which is not written; `reason` is a short name for counting."""

    file: str
    row: int
    reason: str
    problem: Problem
    raw: str  # the row's text in the file, at most MAX_RAW characters


@dataclass
class EncodedChunk:
    """A chunk's encoded and rejected rows."""

    token_ids: list[list[int]] = field(default_factory=list)  # per encoded row
    # column -> JSON bytes per row; None if the row lacks the column
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
    overlong: OverlongPrompts  # whether longer prompts are truncated or rejected
    kept_columns: set[str] | None = None  # other columns to write, None = all

    def encode(self, rows: Sequence[NumberedRow]) -> EncodedChunk:
        """Encode rows; unusable ones are only listed in `rejected`, in row order."""
        chunk = EncodedChunk()
        errors: dict[int, UnusableRow] = {}  # by index into `rows`
        usable: dict[int, Example] = {}  # by index into `rows`
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
        for i, rejection in sorted(errors.items()):
            file, number, row = rows[i]
            raw = row.raw if isinstance(row, UnusableRow) else to_json(row).decode("utf-8")
            chunk.rejected.append(
                Rejected(file, number, rejection.reason, rejection.problem, raw[:MAX_RAW])
            )
        return chunk

    def _fit(self, ids: list[int]) -> list[int]:
        """Return a prompt's ids, truncated if too long and the policy truncates."""
        if not ids:
            raise UnusableRow("no token", NO_TOKEN, "remove the row")
        if self.max_length is None or len(ids) <= self.max_length:
            return ids
        truncated = cut(ids, self.max_length, self.overlong)
        if truncated is None:
            limit = f"--seq-length={self.max_length}"
            rule = f"a prompt must fit {limit}, this one has {len(ids)} tokens"
            raise UnusableRow(TOO_LONG, rule, "raise it or use --overlong keep-tail")
        return truncated

    def _columns(self, rows: Sequence[tuple[Row, Example]]) -> dict[str, list[bytes | None]]:
        """Return name -> JSON bytes per row for the columns written beside the tokens.

        Columns used for the prompt are not written; answers replace the row's own column LABELS.
        """
        columns: dict[str, list[bytes | None]] = {}
        of_prompt = {
            getattr(self.keys, key, None)
            for key in ("prompt", "query", "history", "system", "messages")
        }
        for i, (values, example) in enumerate(rows):
            if example.answer is not None:
                values = {**values, LABELS: example.answer}
            for name, value in values.items():
                is_kept = self.kept_columns is None or name in self.kept_columns
                if is_kept and name not in of_prompt:
                    columns.setdefault(name, [None] * len(rows))[i] = to_json(value)
        return columns


def to_json(value: Any) -> bytes:
    """Encode a value as UTF-8 JSON; `as_text` converts values JSON lacks."""
    text = json.dumps(value, ensure_ascii=False, default=as_text)
    return text.encode("utf-8", "backslashreplace")  # escapes half surrogate pairs
