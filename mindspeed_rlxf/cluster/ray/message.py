"""Encode a request for a rank in plain values, which Ray sends without its pickler.

Lists, text and numbers cost Ray little. Its pickler, partly written in Python, takes about as long
for a request as the rest of a call. So references to rows are encoded as lists; all other arguments
are unchanged, and Ray pickles those that are no plain values.
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

UNCHANGED, ROWS, INPUTS = range(3)  # kinds of encoded arguments
INPUT_NAMES = tuple(field.name for field in dataclasses.fields(ExperienceInputs))


class Message(NamedTuple):
    """An encoded request, the first argument of `RayWorker.run_request`.

    key:     the rank keeps the rows of this call under it
    dropped: keys of rows that the rank deletes first, as no call reads them any more
    args:    each as [kind, plain form]
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
    """Return the arguments of `RayWorker.run_request` for each request: (message,).

    A request that builds a role has (message, reference): its factory and arguments are put into
    Ray's object store, once for all ranks that share them.

    dropped: for each request, the keys of rows that its rank deletes
    """
    written: dict[tuple[int, ...], Any] = {}  # by the identities of arguments
    messages: list[tuple[Any, ...]] = []
    for request, keys in zip(requests, dropped, strict=True):
        same = (id(request.factory), *map(id, request.args))
        args: Any = written.get(same)
        if args is None:
            builds = request.factory is not None
            args = (
                ray.put((request.factory, request.args))
                if builds
                else _encode_arguments(request.args)
            )
            written[same] = args
        how = request.keeps_rows, request.num_rows, request.of_engine
        message = [key, keys, request.role.value, request.method, *how]
        messages.append(
            ([*message, []], args) if request.factory is not None else ([*message, args],)
        )
    return messages


def read_request(message: Message, built: tuple[Any, tuple[Any, ...]] | None) -> Request:
    """Decode a request.

    built: the factory and its arguments, of a request that builds a role; None = of other requests,
           whose arguments are in `message`
    """
    factory, args = built or (None, tuple(_decode_argument(*arg) for arg in message.args))
    role, how = Role(message.role), (message.keeps_rows, message.num_rows)
    return Request(role, message.method, args, *how, factory, message.of_engine)


def _encode_arguments(args: Sequence[Any]) -> list[Any]:
    return [_encode_argument(arg) for arg in args]


def _encode_argument(arg: Any) -> list[Any]:
    """Encode an argument as [kind, plain form].

    [ROWS, encoded RowsRef], [INPUTS, encoded fields] of ExperienceInputs, or [UNCHANGED, argument].
    """
    if type(arg) is RowsRef:
        return [ROWS, _encode_rows(arg)]
    if type(arg) is ExperienceInputs:
        return [INPUTS, _encode_arguments([getattr(arg, name) for name in INPUT_NAMES])]
    return [UNCHANGED, arg]


def _decode_argument(kind: int, data: Any) -> Any:
    """Decode an argument that `_encode_argument` encoded."""
    if kind == ROWS:
        return _decode_rows(*data)
    if kind == INPUTS:
        return ExperienceInputs(*(_decode_argument(*field) for field in data))
    return data


def _encode_rows(rows: RowsRef) -> list[Any]:
    """Encode a reference as [pieces, selection], each piece as [num_rows, *address of its handle].

    Asserts that the handles are RayHandles. A selection of all rows is None.
    """
    pieces = []
    for piece in rows.pieces:
        assert isinstance(piece.handle, RayHandle), f"{piece.handle} is of another runtime"
        pieces.append([piece.num_rows, *piece.handle.address])
    return [pieces, None if rows.selection is None else list(rows.selection)]


def _decode_rows(pieces: Sequence[Sequence[Any]], selection: Sequence[int] | None) -> RowsRef:
    """Decode a reference that `_encode_rows` encoded; its handles are KeptHandles."""
    found = [
        Piece(KeptHandle(process, key, Origin(*origin)), num_rows)
        for num_rows, process, key, *origin in pieces
    ]
    return RowsRef(tuple(found), None if selection is None else tuple(selection))
