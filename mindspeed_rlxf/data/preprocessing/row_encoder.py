"""Encode a chunk of rows: token ids, labels, other columns, and the rows that are rejected."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np

from mindspeed_rlxf.config.enums import OverlongPrompts
from mindspeed_rlxf.config.problems import Problem
from mindspeed_rlxf.data.files import Row, UnusableRow, as_text
from mindspeed_rlxf.data.handlers import LABELS, Handler, Keys, Output
from mindspeed_rlxf.data.preprocessing.examples import Example, make_example
from mindspeed_rlxf.data.prompt_encoder import IGNORED, PromptEncoder
from mindspeed_rlxf.data.prompt_rows import NO_TOKEN, cut
from mindspeed_rlxf.data.sidecar import TOKEN_IDS
from mindspeed_rlxf.data.templates import Turn

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

    num_rows: int = 0  # rows that were encoded
    # column -> (int32 token ids or labels of these rows as bytes, lengths [rows])
    sequences: dict[str, tuple[bytes, list[int]]] = field(default_factory=dict)
    # other column -> JSON bytes [rows]; None if the row lacks the column
    columns: dict[str, list[bytes | None]] = field(default_factory=dict)
    rejected: list[Rejected] = field(default_factory=list)
    num_cut: int = 0  # rows whose prompt was truncated
    num_tokens: int = 0  # token ids of these rows, without labels


IdRows = tuple[list[int], ...]
"""The sequences of one row, in the order of `Handler.sequences`: token ids or labels."""


@dataclass(frozen=True)
class RowEncoder:
    """Encodes rows with one template, handler and tokenizer."""

    prompts: PromptEncoder
    keys: Keys
    handler: Handler
    max_length: int | None  # longest sequence in tokens, None = any
    overlong: OverlongPrompts  # whether longer prompts are truncated; if not, they are rejected
    kept_columns: set[str] | None = None  # other columns of the rows to write, None = all
    end_id: int | None = None  # appended to a conversation that does not end with it

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
        kept: dict[int, IdRows] = {}
        for i, ids in zip(usable, self._id_rows(list(usable.values())), strict=True):
            try:
                kept[i] = self._fit(ids)
                chunk.num_cut += len(kept[i][0]) < len(ids[0])
            except UnusableRow as error:
                errors[i] = error
        for i in sorted(errors):
            file, number, row = rows[i]
            raw = row.raw if isinstance(row, UnusableRow) else to_json(row).decode("utf-8")
            found = errors[i]
            chunk.rejected.append(
                Rejected(file, number, found.reason, found.problem, raw[:MAX_RAW])
            )
        written = [(cast("Row", rows[i].row), usable[i]) for i in kept]
        chunk.num_rows, chunk.columns = len(kept), self._columns(written)
        for i, name in enumerate(self.handler.sequences):
            items = np.asarray([item for ids in kept.values() for item in ids[i]], dtype=np.int32)
            chunk.sequences[name] = items.tobytes(), [len(ids[i]) for ids in kept.values()]
            chunk.num_tokens += len(items) if name.endswith(TOKEN_IDS) else 0
        return chunk

    def _id_rows(self, examples: Sequence[Example]) -> list[IdRows]:
        """Return the sequences of each example. Pairs have labels in the last response only."""
        if not self.handler.has_responses:
            return [(ids,) for ids in self.prompts.encode([e.turns for e in examples])]
        conversations = [
            [*example.turns, Turn("assistant", response)]
            for example in examples
            for response in example.responses
        ]
        labelled = self.prompts.encode_labelled(conversations)
        if self.handler.output is Output.PAIR:
            for each in labelled:  # the last response alone
                start = max((i for i, n in enumerate(each.labels) if n == IGNORED), default=0)
                each.labels[:start] = [IGNORED] * start
            rows = [(each.token_ids, each.labels) for each in labelled]
            return [(*rows[i], *rows[i + 1]) for i in range(0, len(rows), 2)]
        for each in labelled:
            if self.end_id is not None and each.token_ids[-1:] != [self.end_id]:
                each.token_ids.append(self.end_id)
                each.labels.append(self.end_id)
        return [(each.token_ids, each.labels) for each in labelled]

    def _fit(self, ids: IdRows) -> IdRows:
        """Return a row's sequences; a prompt that is too long is cut if the policy cuts prompts."""
        if not all(ids):
            raise UnusableRow("no token", NO_TOKEN, "remove the row")
        longest = max(map(len, ids))
        if self.max_length is None or longest <= self.max_length:
            return ids
        kept = None if len(ids) > 1 else cut(ids[0], self.max_length, self.overlong)
        if kept is None:
            name = "conversation" if len(ids) > 1 else "prompt"
            remedy = "raise it" if len(ids) > 1 else "raise it or use --overlong keep-tail"
            limit = f"--seq-length={self.max_length}"
            raise UnusableRow(
                TOO_LONG, f"a {name} must fit {limit}, this one has {longest} tokens", remedy
            )
        return (kept,)

    def _columns(self, rows: Sequence[tuple[Row, Example]]) -> dict[str, list[bytes | None]]:
        """Return name -> JSON bytes of each row for the columns to write beside the tokens.

        Columns that became the prompt are not written. If the handler writes answers (ANSWERED),
        column `labels` has the row's response, in place of a column `labels` of the row.
        """
        columns: dict[str, list[bytes | None]] = {}
        parts = ("prompt", "query", "history", "system", "messages")
        consumed, kept = {getattr(self.keys, part, None) for part in parts}, self.kept_columns
        for i, (values, example) in enumerate(rows):
            if self.handler.output is Output.ANSWERED and example.responses:
                values = {**values, LABELS: example.responses[0]}
            for name, value in values.items():
                if name not in consumed and (kept is None or name in kept):
                    columns.setdefault(name, [None] * len(rows))[i] = to_json(value)
        return columns


def to_json(value: Any) -> bytes:
    """Encode a value as UTF-8 JSON; values that JSON lacks become text (`as_text`)."""
    text = json.dumps(value, ensure_ascii=False, default=as_text)
    return text.encode("utf-8", "backslashreplace")  # half a surrogate pair becomes its escape
