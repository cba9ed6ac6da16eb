"""Requests on their way to a worker: bytes, and beside them the object references that they hold.

Ray has to see every reference, and pickles the rest with a pickler that is partly written in
Python. Requests are plain data, for which that of the standard library is enough.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import threading
from typing import Any

import ray

from mindspeed_rlxf.cluster.protocol import Request

Message = tuple[bytes, list[Any]]
"""A pickled request, and its references by their number."""

_received = threading.local()


def pack(request: Request) -> Message:
    """Make the message of a request. One that builds may hold functions that no module has."""
    if request.factory is not None:
        return ray.cloudpickle.dumps(request), []
    refs: list[Any] = []

    def number(ref: Any) -> tuple[Any, tuple[int]]:
        refs.append(ref)
        return _reference, (len(refs) - 1,)

    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = {**copyreg.dispatch_table, ray.ObjectRef: number}
    pickler.dump(request)
    return buffer.getvalue(), refs


def unpack(message: Message) -> Request:
    """Return the request of a message that this run's driver packed."""
    data, _received.refs = message
    try:
        request = pickle.loads(data)
    finally:
        _received.refs = []
    assert isinstance(request, Request)
    return request


def _reference(number: int) -> Any:
    return _received.refs[number]
