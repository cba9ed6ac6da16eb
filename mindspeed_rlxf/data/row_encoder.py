"""A chunk of rows becomes what is written of it: token ids, other columns, rejected rows."""

from __future__ import annotations

import base64
import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mindspeed_rlxf.config.enums import OverlongPrompts
from mindspeed_rlxf.data.conversation import MapKeys, UnusableRow, conversation_of
from mindspeed_rlxf.data.files import BadRow, Row
from mindspeed_rlxf.data.lengths import cut
from mindspeed_rlxf.data.prompt_encoder import PromptEncoder
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
    """A row that is not written, and why (`rule, value; remedy`)."""

    file: str
    row: int
    reason: str
    problem: str
    raw: str


@dataclass
class EncodedChunk:
    """token_ids: int32 bytes of all prompts behind each other, `lengths` [rows] in tokens.
    columns:   name -> JSON bytes [rows]; None where the row lacks the column
    """

    token_ids: bytes = b""
    lengths: list[int] = field(default_factory=list)
    columns: dict[str, list[bytes | None]] = field(default_factory=dict)
    rejected: list[Rejected] = field(default_factory=list)
    num_cut: int = 0


@dataclass(frozen=True)
class RowEncoder:
    """max_length: longest prompt in tokens, None = any; `overlong` says what becomes of others."""

    prompts: PromptEncoder
    keys: MapKeys
    max_length: int | None
    overlong: OverlongPrompts

    def encode(self, rows: Sequence[NumberedRow]) -> EncodedChunk:
        chunk, usable, conversations = EncodedChunk(), [], []
        for row in rows:
            turns = self._conversation(row, chunk.rejected)
            if turns is not None:
                usable.append(row)
                conversations.append(turns)
        written, parts = [], []
        for row, ids in zip(usable, self.prompts.encode(conversations), strict=True):
            kept = self._fitting(row, ids, chunk.rejected)
            if kept is not None:
                chunk.num_cut += len(kept) < len(ids)
                chunk.lengths.append(len(kept))
                parts.append(np.asarray(kept, dtype=np.int32).tobytes())
                written.append(row)
        chunk.token_ids = b"".join(parts)
        chunk.columns = self._columns(written)
        order = {(row.file, row.number): place for place, row in enumerate(rows)}
        chunk.rejected.sort(key=lambda reject: order[reject.file, reject.row])
        return chunk

    def _conversation(self, row: NumberedRow, rejected: list[Rejected]) -> list[Turn] | None:
        if isinstance(row.row, BadRow):
            rejected.append(_rejected(row, row.row.reason, row.row.problem))
            return None
        try:
            return conversation_of(row.row, self.keys)
        except UnusableRow as error:
            rejected.append(_rejected(row, error.reason, str(error)))
            return None

    def _fitting(
        self, row: NumberedRow, ids: list[int], rejected: list[Rejected]
    ) -> list[int] | None:
        if not ids:
            problem = "a prompt must have a token, the tokenizer makes none of this one"
            rejected.append(_rejected(row, "no token", f"{problem}; remove the row"))
            return None
        if self.max_length is None or len(ids) <= self.max_length:
            return ids
        kept = cut(ids, self.max_length, self.overlong)
        if kept is None:
            problem = (
                f"a prompt must fit --seq-length={self.max_length}, this one has {len(ids)} "
                "tokens; raise it or use --overlong keep-tail"
            )
            rejected.append(_rejected(row, TOO_LONG, problem))
        return kept

    def _columns(self, rows: Sequence[NumberedRow]) -> dict[str, list[bytes | None]]:
        columns: dict[str, list[bytes | None]] = {}
        consumed = self.keys.consumed
        for place, row in enumerate(rows):
            assert isinstance(row.row, dict), "bad rows are rejected before"
            for name, value in row.row.items():
                if name not in consumed:
                    if name not in columns:
                        columns[name] = [None] * len(rows)
                    columns[name][place] = json_bytes(value)
        return columns


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


def _rejected(row: NumberedRow, reason: str, problem: str) -> Rejected:
    raw = row.row.raw if isinstance(row.row, BadRow) else json_bytes(row.row).decode("utf-8")
    return Rejected(row.file, row.number, reason, problem, raw[:MAX_RAW])
