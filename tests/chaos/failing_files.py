"""Simulate a full disk: fail one chosen step of those that write files below a folder."""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

WRITE = re.compile(r"^write (\d+) of (.*)$")
RANDOM = re.compile(r"\.[0-9a-f]{16}\.tmp$")  # end of a name that `files.safe.hidden_name` makes


def choose_steps(steps: list[str]) -> list[str]:
    """Return all steps, but of the writes to one file only the 1st, 2nd, 4th, 8th, ... and last.

    An archive has hundreds of writes.
    """
    writes = [match.groups() for match in map(WRITE.match, steps) if match]
    last = {file: max(int(n) for n, f in writes if f == file) for _, file in writes}

    def wanted(step: str) -> bool:
        match = WRITE.match(step)
        if match is None:
            return True
        number = int(match.group(1))
        return number.bit_count() == 1 or number == last[match.group(2)]

    return [step for step in steps if wanted(step)]


class FailingFiles:
    """List the opens, writes, fsyncs, renames, and mkdirs below a folder; fail one.

    failing: name of the step that raises OSError ENOSPC, "" = none
    steps:   names of the steps so far

    A step has the same name in every save and process, in whatever order threads take the steps.
    """

    def __init__(self, folder: Path, failing: str) -> None:
        self._folder, self._failing = str(folder.resolve()), failing
        self._seen: Counter[str] = Counter()
        self.steps: list[str] = []

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for module, name, make in (
                (builtins, "open", self._open),
                (io, "open", self._open),
                (os, "open", self._descriptor),
                (os, "fsync", self._sync),
                (os, "replace", self._named),
                (os, "rename", self._named),
                (os, "mkdir", self._named),
            ):
                wrapped = make(name, getattr(module, name))
                stack.enter_context(mock.patch.object(module, name, wrapped))
            yield

    def step(self, what: str, path: Any) -> None:
        """Add a step, unless it is outside of the folder. Raises OSError where it is `failing`."""
        path = os.path.abspath(os.fspath(path))
        if not path.startswith(self._folder):
            return
        relative = os.path.relpath(path, self._folder).replace(f".{os.getpid()}", ".PID")
        name = f"{what} {RANDOM.sub('.TMP', re.sub('iter_[0-9]+', 'iter', relative))}"
        self._seen[name] += 1
        if self._seen[name] > 1:
            name = f"{name} (time {self._seen[name]})"
        self.steps.append(name)
        if name == self._failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def _open(self, _name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if not set(mode) & set("wax+"):
                return original(file, mode, *args, **kwargs)
            if isinstance(file, int):  # a descriptor of `os.open`, whose open is a step already
                path = os.readlink(f"/proc/self/fd/{file}")
                return Stream(original(file, mode, *args, **kwargs), path, self)
            self.step("open", file)
            return Stream(original(file, mode, *args, **kwargs), file, self)

        return opened

    def _descriptor(self, _name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def opened(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            if flags & (os.O_WRONLY | os.O_RDWR):
                self.step("open", path)
            return int(original(path, flags, *args, **kwargs))

        return opened

    def _sync(self, _name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def synced(descriptor: int) -> None:
            self.step("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
            original(descriptor)

        return synced

    def _named(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def called(path: Any, *args: Any, **kwargs: Any) -> Any:
            if not (name == "mkdir" and os.path.isdir(path)):  # an existing folder is not written
                self.step(name, path)
            return original(path, *args, **kwargs)

        return called


class Stream:
    """Wrap an open file so that each write is a step of `files`."""

    def __init__(self, stream: Any, path: Any, files: FailingFiles) -> None:
        self._stream, self._path, self._files = stream, path, files
        self._writes = 0

    def write(self, data: Any) -> Any:
        self._writes += 1
        self._files.step(f"write {self._writes} of", self._path)
        return self._stream.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def __iter__(self) -> Any:
        return iter(self._stream)
