"""The request of a call on its way to a rank, in values that Ray packs without its pickler.

Lists, text and numbers cost Ray little. Its pickler, partly written in Python, takes about as long
for a request as the rest of a call. So references to rows become lists here; all other arguments
stay as they are, and Ray pickles those that are no plain values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import ray

from mindspeed_rlxf.cluster.errors import Origin
from mindspeed_rlxf.cluster.protocol import Request
from mindspeed_rlxf.cluster.ray.rows import KeptHandle, RayHandle
from mindspeed_rlxf.cluster.refs import Piece, RowsRef
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.data.batch import ExperienceInputs

AS_IT_IS, ROWS, INPUTS = range(3)  # kinds of arguments
INPUT_NAMES = tuple(field.name for field in dataclasses.fields(ExperienceInputs))


class Message(NamedTuple):
    """Arguments of `RayWorker.run_request`.

    key:     under which the rank keeps the rows
    dropped: keys of rows that no call reads any more
    args:    as `_write` makes them
    """

    key: int
    dropped: list[int]
    role: str
    method: str
    keeps_rows: bool
    num_rows: int | None
    of_engine: bool
    args: list[Any]


def make_messages(
    requests: Sequence[Request], key: int, dropped: Sequence[list[int]]
) -> list[tuple[Any, ...]]:
    """Return, for each request, what `RayWorker.run_request` is called with.

    A factory and its arguments are put into Ray's object store, once for all ranks that share them.

    dropped: for each request
    """
    written: dict[tuple[int, ...], Any] = {}  # by the identities of arguments
    messages: list[tuple[Any, ...]] = []
    for request, keys in zip(requests, dropped, strict=True):
        same = (id(request.factory), *map(id, request.args))
        args: Any = written.get(same)
        if args is None:
            builds = request.factory is not None
            args = ray.put((request.factory, request.args)) if builds else _write_all(request.args)
            written[same] = args
        how = request.keeps_rows, request.num_rows, request.of_engine
        message = [key, keys, request.role.value, request.method, *how]
        messages.append(
            ([*message, []], args) if request.factory is not None else ([*message, args],)
        )
    return messages


def read_request(message: Message, built: tuple[Any, tuple[Any, ...]] | None) -> Request:
    """Return the request. built: the factory and its arguments, of a request that builds"""
    factory, args = built or (None, tuple(_read(*arg) for arg in message.args))
    role, how = Role(message.role), (message.keeps_rows, message.num_rows)
    return Request(role, message.method, args, *how, factory, message.of_engine)


def _write_all(args: Sequence[Any]) -> list[Any]:
    return [_write(arg) for arg in args]


def _write(arg: Any) -> list[Any]:
    """Return the kind of an argument and its plain form."""
    if type(arg) is RowsRef:
        return [ROWS, _write_rows(arg)]
    if type(arg) is ExperienceInputs:
        return [INPUTS, _write_all([getattr(arg, name) for name in INPUT_NAMES])]
    return [AS_IT_IS, arg]


def _read(kind: int, data: Any) -> Any:
    """Return the argument that `_write` wrote."""
    if kind == ROWS:
        return _read_rows(*data)
    if kind == INPUTS:
        return ExperienceInputs(*(_read(*field) for field in data))
    return data


def _write_rows(rows: RowsRef) -> list[Any]:
    pieces = []
    for piece in rows.pieces:
        assert isinstance(piece.handle, RayHandle), f"{piece.handle} is of another runtime"
        pieces.append([piece.num_rows, *piece.handle.place])
    return [pieces, None if rows.selection is None else list(rows.selection)]


def _read_rows(pieces: Sequence[Sequence[Any]], selection: Sequence[int] | None) -> RowsRef:
    found = [
        Piece(KeptHandle(process, key, Origin(*origin)), num_rows)
        for num_rows, process, key, *origin in pieces
    ]
    return RowsRef(tuple(found), None if selection is None else tuple(selection))
