"""Run code that reads hostile files, with canaries in place of dangerous calls and with limits."""

import builtins
import io
import os
import posix
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.models.parameters import Head, hf_shapes
from mindspeed_rlxf.weights.chunks import whole
from mindspeed_rlxf.weights.folders import open_weights
from tests.unit.weights.folders_of import architecture_of

SECONDS, BYTES = 5.0, 1 << 30  # limits of one read: CPU time, growth of the peak memory
ARCHITECTURE = architecture_of("llama")


def report_canary(*arguments: Any, **_: Any) -> None:
    """End the whole test run with exit code 9."""
    pytest.exit(f"CANARY: a hostile file ran {arguments!r}", 9)


CANARIES = [
    *((os, "system"), (posix, "system"), (os, "popen"), (os, "execv"), (posix, "execv")),
    *((os, "posix_spawn"), (posix, "posix_spawn"), (os, "mkdir"), (posix, "mkdir")),
    *((subprocess, "Popen"), (builtins, "eval"), (builtins, "exec"), (os, "fork")),
]


@contextmanager
def canaries() -> Iterator[None]:
    """Inside the block a call of CANARIES, or a file opened for writing, ends the test run."""
    original = io.open

    def read_only(file: Any, mode: str = "r", *rest: Any, **more: Any) -> Any:
        if set(mode) & set("wax+"):
            return report_canary(file, mode)
        return original(file, mode, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        for module, name in CANARIES:
            patch.setattr(module, name, report_canary)
        patch.setattr(builtins, "open", read_only)
        patch.setattr(io, "open", read_only)
        yield


def outcome(read: Callable[[], Any]) -> str:
    """Call `read` under canaries; return the message of its ValueError, "" when it succeeds.

    Fails the test for another exception, for a message that is empty, long or unprintable, and for
    a read beyond SECONDS or BYTES.
    """
    before, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with canaries():
        try:
            read()
            message = ""
        except ValueError as error:
            message = str(error)
            assert message, "an error must have a message"
            assert all(c.isprintable() for c in message), f"control characters: {message!r}"
            assert len(message) < 4000
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    assert time.process_time() - before < SECONDS and grown * 1024 < BYTES
    return message


def read_all(folder: Path) -> None:
    """Read every tensor of a folder, as a conversion does. Raises ValueError for a missing one."""
    weights = open_weights(folder, ARCHITECTURE)
    for name, shape in hf_shapes(ARCHITECTURE, Head.LANGUAGE_MODEL).items():
        if name not in weights or weights[name].shape != shape:
            raise ValueError(f"{name} is missing")
        assert weights[name].read(whole(shape)).shape == shape
