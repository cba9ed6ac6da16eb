"""Python files of the user, which other processes get as text.

The driver reads a file once, when the configuration is made. It sends the text to a worker before
the worker builds a role, so no other host needs the file.
"""

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import dataclass
from importlib.abc import InspectLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from traceback import extract_tb
from types import CodeType, ModuleType
from typing import Any

from mindspeed_rlxf.config.errors import Problem, UserError

MODULES = "rlxf_plugin_"
"""Prefix of the names of the files' modules."""


@dataclass(frozen=True)
class Source:
    """Path and text of a Python file of the user."""

    file: str  # on the driver's host
    text: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def module(self) -> str:
        """Name of the module that runs the text; other texts of the same file have other names."""
        return f"{MODULES}{Path(self.file).stem}_{self.sha256[:12]}"


class _Loader(InspectLoader):
    """Import loader of a text. Tracebacks can show its lines."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def get_source(self, fullname: str) -> str:
        return self.source.text

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.source.text, self.source.file)


def run_as_module(source: Source) -> ModuleType:
    """Run the file as a new module of this process, put it in `sys.modules` and return it.

    Its exceptions are not caught; the module is removed from `sys.modules` then.
    """
    spec = spec_from_loader(source.module, _Loader(source))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[source.module] = module  # dataclasses and pickle look it up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[source.module]
        raise
    return module


def read_source(key: str, path: str, expected: str | None = None) -> Source:
    """Return the text of the Python file `path`, with its absolute path; `~` is expanded.

    key:      of the configuration that names the file, for problems
    expected: SHA-256 that the text must have; None = any
    Errors: UserError where the file cannot be read or has another hash.
    """
    file = os.path.abspath(os.path.expanduser(path))
    try:
        source = Source(file, Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        rule = f"must be a Python file that can be read: {reason}"
        raise UserError(Problem(key, rule, file, "correct the path")) from error
    if expected not in (None, source.sha256):
        rule = f"must be the file of sha256 {expected}, its sha256 is {source.sha256}"
        raise UserError(Problem(key, rule, file, "put it back, or remove sha256"))
    return source


def load_error(key: str, file: str, error: BaseException) -> UserError:
    """Return a UserError that reports an exception that running `file` raised.

    The text has the exception's type and message, and its line in `file`, or `while loading`.
    key: of the configuration that names the file
    """
    rule = f"must run without an error, {type(error).__name__} {_find_line(file, error)}: {error}"
    return UserError(Problem(key, rule, file, "correct the file"))


def _find_line(file: str, error: BaseException) -> str:
    """Return `in line N`: of a SyntaxError in `file`, else the last line of it in the traceback.

    `while loading` if the traceback has none.
    """
    if isinstance(error, SyntaxError) and error.filename == file and error.lineno:
        return f"in line {error.lineno}"
    lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == file]
    return f"in line {lines[-1]}" if lines else "while loading"


_carried: dict[tuple[str, str], Source] = {}  # (file, SHA-256) -> text that workers also need


def carry(source: Source) -> None:
    """Register a source in this process for `find_carried`, and for sending to workers."""
    _carried[source.file, source.sha256] = source


def list_carried() -> tuple[Source, ...]:
    """Return all sources registered by `carry`."""
    return tuple(_carried.values())


def find_carried(file: str, sha256: str) -> Source:
    """Return the source registered by `carry`. Errors: KeyError where there is none."""
    return _carried[file, sha256]


def split_entry(entry: Any, name: str) -> tuple[Any, Any]:
    """Return (path, SHA-256) of an entry: a path, or a dict {name: path, sha256: ...}.

    Each is None where it is absent. Values are not checked; other keys of the dict are ignored.
    """
    given = entry if isinstance(entry, dict) else {name: entry}
    return given.get(name), given.get("sha256")
