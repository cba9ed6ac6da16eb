"""Runs a reader of hostile files under canaries and bounds."""

from __future__ import annotations

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
from mindspeed_rlxf.weights.boxes import whole
from mindspeed_rlxf.weights.folders import open_weights
from tests.unit.weights.folders_of import architecture_of

SECONDS, BYTES = 5.0, 1 << 30  # of one case
ARCHITECTURE = architecture_of("llama")


def sing(*arguments: Any, **_: Any) -> None:
    pytest.exit(f"CANARY: a hostile file ran {arguments!r}", 9)


CANARIES = [
    *((os, "system"), (posix, "system"), (os, "popen"), (os, "execv"), (posix, "execv")),
    *((os, "posix_spawn"), (posix, "posix_spawn"), (os, "mkdir"), (posix, "mkdir")),
    *((subprocess, "Popen"), (builtins, "eval"), (builtins, "exec"), (os, "fork")),
]


@contextmanager
def armed() -> Iterator[None]:
    """Inside, what payloads name ends the tests, and so does a file that is opened for writing."""
    opened = io.open

    def read_only(file: Any, mode: str = "r", *rest: Any, **more: Any) -> Any:
        return sing(file, mode) if set(mode) & set("wax+") else opened(file, mode, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        for module, name in CANARIES:
            patch.setattr(module, name, sing)
        patch.setattr(builtins, "open", read_only)
        patch.setattr(io, "open", read_only)
        yield


def outcome(read: Callable[[], Any]) -> str:
    """The error's one sentence, empty when the data were read; anything else fails the test."""
    before, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with armed():
        try:
            read()
            said = ""
        except ValueError as error:
            said = str(error)
            assert said, "an error says something"
            assert all(c.isprintable() for c in said), f"control characters: {said!r}"
            assert len(said) < 4000
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    assert time.process_time() - before < SECONDS and grown * 1024 < BYTES
    return said


def read_all(folder: Path) -> None:
    """As a conversion does: every number of every tensor."""
    weights = open_weights(folder, ARCHITECTURE)
    for name, shape in hf_shapes(ARCHITECTURE, Head.LANGUAGE_MODEL).items():
        if name not in weights or weights.shape(name) != shape:
            raise ValueError(f"{name} is missing")
        assert weights.read(name, whole(shape)).shape == shape
