"""Run what hostile input may drive without end in a forked process with limits.

Limits of the kernel, as neither a deadline nor a handler of this process stops a power of large
integers or a text of terabytes. Values come back as JSON, so a result is numbers, texts, lists and
dicts, whose keys may be numbers too.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import signal
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

LENGTH = struct.Struct("<Q")
WALL_S = 30.0  # longest wait for one value, for a process that is stopped or starved


class OutOfBoundsError(ValueError):
    """A value took more time or memory than it may."""


def stream_bounded(
    values: Callable[[], Iterator[Any]], cpu_s: float, memory_bytes: int
) -> Iterator[Any]:
    """What `values()` yields, made in a process of its own.

    cpu_s:        seconds of computing for each value
    memory_bytes: of address space, beyond what this process has
    Raises OutOfBoundsError when a value is not made within that.
    """
    source, sink = os.pipe()
    child = os.fork()
    if not child:
        os.close(source)
        _make(values, sink, cpu_s, memory_bytes)
    os.close(sink)
    try:
        while (frame := _frame(source)) is not None:
            yield _unpacked(json.loads(frame))
    finally:
        os.close(source)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def run_bounded(action: Callable[[], Any], cpu_s: float, memory_bytes: int) -> Any:
    """The result of `action`, made in a process of its own; see `stream_bounded`."""
    (found,) = stream_bounded(lambda: iter([action()]), cpu_s, memory_bytes)
    return found


def _make(values: Callable[[], Iterator[Any]], sink: int, cpu_s: float, memory: int) -> NoReturn:
    """The child: writes a frame for each value, an empty one behind the last."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPROF):
            signal.signal(number, signal.SIG_DFL)
        gc.freeze()  # collecting what is there already would copy it, at this value's cost
        limit = _address_space() + memory
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # of computing: ends the process
        for value in values():
            _write(sink, json.dumps(_packed(value)).encode())
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
        _write(sink, b"")
    finally:
        os._exit(0)


def _packed(value: Any) -> Any:
    """As JSON has it: a dict as its items in one more list, which keeps keys that are no text."""
    if isinstance(value, dict):
        return {"items": [[key, _packed(item)] for key, item in value.items()]}
    return [_packed(item) for item in value] if isinstance(value, (list, tuple)) else value


def _unpacked(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _unpacked(item) for key, item in value["items"]}
    return [_unpacked(item) for item in value] if isinstance(value, list) else value


def _address_space() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _write(sink: int, frame: bytes) -> None:
    content = memoryview(LENGTH.pack(len(frame)) + frame)
    while content:
        content = content[os.write(sink, content) :]


def _frame(source: int) -> bytes | None:
    """The next one; None behind the last."""
    deadline = time.monotonic() + WALL_S
    (length,) = LENGTH.unpack(_read(source, LENGTH.size, deadline))
    return _read(source, length, deadline) if length else None


def _read(source: int, length: int, deadline: float) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        ready, _, _ = select.select([source], [], [], max(deadline - time.monotonic(), 0))
        part = os.read(source, min(length - len(parts), 2**20)) if ready else b""
        if not part:
            raise OutOfBoundsError("it takes more time or memory than it may")
        parts += part
    return bytes(parts)
