"""A disk that fails once: at a named step of those that put files below a folder."""

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

import torch

WRITE = re.compile(r"^write (\d+) of (.*)$")
RANDOM = re.compile(r"\.[0-9a-f]{16}\.tmp$")  # how `files.safe.hidden_name` ends


def worth_failing(steps: list[str]) -> list[str]:
    """All steps, of a file's writes the 1st, 2nd, 4th, 8th, ... and the last: archives have
    hundreds of them."""
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
    """Notes opens, writes, syncs, renames, new folders and archives of torch.

    failing: the step that fails with ENOSPC, "" = none, to learn which there are. Steps have the
    same names in every save of every process, whatever the order in which threads take them.
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
                (torch, "save", self._save),
            ):
                wrapped = make(name, getattr(module, name))
                stack.enter_context(mock.patch.object(module, name, wrapped))
            yield

    def step(self, what: str, path: Any) -> None:
        path = os.path.abspath(os.fspath(path))
        if not path.startswith(self._folder):
            return
        place = os.path.relpath(path, self._folder).replace(f".{os.getpid()}", ".PID")
        name = f"{what} {RANDOM.sub('.TMP', re.sub('iter_[0-9]+', 'iter', place))}"
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
            if isinstance(file, int):  # opened by `os.open`
                place = os.readlink(f"/proc/self/fd/{file}")
                return Stream(original(file, mode, *args, **kwargs), place, self)
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
            if not (name == "mkdir" and os.path.isdir(path)):  # which nobody minds
                self.step(name, path)
            return original(path, *args, **kwargs)

        return called

    def _save(self, _name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def saved(value: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(file, (str, os.PathLike)):  # written by C++, not by a stream
                self.step("torch.save", file)
            return original(value, file, *args, **kwargs)

        return saved


class Stream:
    """A file whose writes are steps."""

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
