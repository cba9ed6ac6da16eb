"""What the driver and a worker send each other for one call: two short strings of bytes.

Ray passes bytes on as they are. Its own pickler, partly written in Python, takes as long for a
request as the rest of a call. References to rows are plain words (`rows.KeptHandle`), so Ray has
nothing to count.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import ray

from mindspeed_rlxf.cluster.protocol import Reply, Request


class Envelope(NamedTuple):
    """A request on its way to one rank.

    body:    the pickled request, which `read_request` reads
    key:     under which the rank keeps the rows
    dropped: keys of rows that no call reads any more
    """

    body: bytes
    key: int
    role: str
    method: str
    keeps_rows: bool
    dropped: Sequence[int]


def pack_requests(
    requests: Sequence[Request], key: int, dropped: Sequence[Sequence[int]]
) -> list[bytes]:
    """Return the message of each request; arguments that ranks share are pickled once.

    dropped: for each request
    """
    bodies: dict[tuple[Any, ...], bytes] = {}
    messages = []
    for request, keys in zip(requests, dropped, strict=True):
        same = id(request.role), request.method, request.num_rows, id(request.factory)
        shared = *same, *map(id, request.args)
        if (body := bodies.get(shared)) is None:
            body = bodies[shared] = _dump_body(request)
        # A tuple, as the class would have to be named in each message.
        parts = body, key, request.role.value, request.method, request.keeps_rows, keys
        messages.append(pickle.dumps(parts, pickle.HIGHEST_PROTOCOL))
    return messages


def open_envelope(message: bytes) -> Envelope:
    """Open a message of this run's driver; its request stays closed."""
    return Envelope(*pickle.loads(message))


def read_request(envelope: Envelope) -> Request:
    """Return the request. Raises what importing the modules of its arguments raises."""
    role, args, num_rows, factory, of_engine = pickle.loads(envelope.body)
    return Request(role, envelope.method, args, envelope.keeps_rows, num_rows, factory, of_engine)


def pack_reply(reply: Reply) -> bytes:
    """Return the reply as bytes; a report may be of a class that no module has."""
    data: bytes = ray.cloudpickle.dumps(reply)
    return data


def read_reply(data: bytes) -> Reply:
    """Return the reply of a worker of this run."""
    reply = pickle.loads(data)
    assert isinstance(reply, Reply), f"a worker replied with a {type(reply).__name__}"
    return reply


def _dump_body(request: Request) -> bytes:
    """Pickle the parts that ranks share. A request that builds may hold functions of no module."""
    parts = request.role, request.args, request.num_rows, request.factory, request.of_engine
    if request.factory is not None:
        data: bytes = ray.cloudpickle.dumps(parts)
        return data
    return pickle.dumps(parts, pickle.HIGHEST_PROTOCOL)
