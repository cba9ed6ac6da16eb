"""A disk that fails once: at the nth step that puts a file below a folder."""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

SOME_WRITES = {4**n for n in range(10)}  # of a file: torch's archives have hundreds


class FailingFiles:
    """Counts opens, some of the writes, syncs, renames, new folders and archives of torch.

    failing: the step, from 1, that fails with ENOSPC; 0 = none, to learn how many there are
    """

    def __init__(self, folder: Path, failing: int) -> None:
        self._folder, self._failing = str(folder.resolve()), failing
        self.steps: list[str] = []

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for module, name, make in (
                (builtins, "open", self._open),
                (io, "open", self._open),
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
        if not os.path.abspath(os.fspath(path)).startswith(self._folder):
            return
        self.steps.append(f"{what} {Path(path).name}")
        if len(self.steps) == self._failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def _open(self, _name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if isinstance(file, int) or not set(mode) & set("wax+"):
                return original(file, mode, *args, **kwargs)
            self.step("open", file)
            return Stream(original(file, mode, *args, **kwargs), file, self)

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
        if self._writes in SOME_WRITES:
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
