"""Run code in a forked process with limits, because hostile input may make it run for ever.

The kernel enforces the limits, because neither a deadline nor a signal handler in this process
stops a power of large integers or a text of terabytes. Results come back as JSON: numbers, texts,
lists (also for tuples) and dicts, whose keys may be numbers too.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe
from typing import Any, NoReturn

WALL_S = 30.0  # longest wait for one value, in wall-clock time


class OutOfBoundsError(ValueError):
    """A value took more time or memory than allowed, or the process that computed it died."""


def stream_bounded(
    values: Callable[[], Iterator[Any]], cpu_s: float, memory_bytes: int
) -> Iterator[Any]:
    """Yield the values of `values()`, computed in a forked child process, and kill it at the end.

    The first `next` forks; closing the generator ends the child too.
    cpu_s:        processor seconds for each value
    memory_bytes: address space of the child, beyond what this process has
    Errors: OutOfBoundsError for a value that exceeds a limit or WALL_S, and also where `values`
    raises any exception or a value is not JSON: the child cannot report which.
    """
    source, sink = Pipe(duplex=False)
    child = os.fork()
    if not child:
        source.close()
        _run_child(values, sink, cpu_s, memory_bytes)
    sink.close()
    try:
        while frame := _receive_message(source):
            yield _unpack_dicts(json.loads(frame))
    finally:
        source.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def run_bounded(action: Callable[[], Any], cpu_s: float, memory_bytes: int) -> Any:
    """Return the result of `action`, computed in a forked child process with limits.

    Arguments and errors as in `stream_bounded`.
    """
    (found,) = stream_bounded(lambda: iter([action()]), cpu_s, memory_bytes)
    return found


def _run_child(
    values: Callable[[], Iterator[Any]], sink: Connection, cpu_s: float, memory: int
) -> NoReturn:
    """Set the limits in this process, send each value to `sink` as JSON, then b"", and exit.

    If `values` fails, exits without sending b"".
    cpu_s:  CPU seconds for each value
    memory: bytes of address space beyond those in use now
    """
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPROF):
            signal.signal(number, signal.SIG_DFL)
        gc.freeze()  # collecting the parent's objects would cost time and copy their pages
        limit = _address_space() + memory
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # SIGPROF ends the process
        for value in values():
            sink.send_bytes(json.dumps(_pack_dicts(value)).encode())
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
        sink.send_bytes(b"")
    finally:
        os._exit(0)


def _pack_dicts(value: Any) -> Any:
    """Return the value for JSON, with each dict, at any depth, as {"items": [[key, value], ...]}.

    This keeps keys that are numbers, which JSON objects would turn into text. Tuples become lists.
    """
    if isinstance(value, dict):
        return {"items": [[key, _pack_dicts(item)] for key, item in value.items()]}
    return [_pack_dicts(item) for item in value] if isinstance(value, (list, tuple)) else value


def _unpack_dicts(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _unpack_dicts(item) for key, item in value["items"]}
    return [_unpack_dicts(item) for item in value] if isinstance(value, list) else value


def _address_space() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _receive_message(source: Connection) -> bytes:
    """Return the next message of the child; b"" after the last value.

    Errors: OutOfBoundsError where the child has died, or sends nothing for WALL_S.
    """
    try:
        if source.poll(WALL_S):
            return source.recv_bytes()
    except (EOFError, OSError):  # the child was killed
        pass
    raise OutOfBoundsError("it takes more time or memory than it may")
