"""Python files of the user that add estimators, reward rules and rollout engines (docs/plugins.md).

The driver reads a file once, when the configuration is made, and runs it. Workers get its text with
the first role that is built in them and run that, so no other host needs the file. What a file
registers is known to the process from then on.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.abc import InspectLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from traceback import extract_tb
from types import CodeType
from typing import Any, TypeVar

from mindspeed_rlxf.config.errors import Problem, UserError
from mindspeed_rlxf.files.plain import read_text

KEY = "training.plugins"
T = TypeVar("T")


@dataclass(frozen=True)
class Source:
    file: str  # on the driver's host
    text: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def module(self) -> str:
        """Name of the module in a process; another text is another module."""
        return f"rlxf_plugin_{Path(self.file).stem}_{self.sha256[:12]}"


class _Loader(InspectLoader):
    """Runs a text as a module; the loader also lets tracebacks show its lines."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def get_source(self, fullname: str) -> str:
        return self.source.text

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.source.text, self.source.file)


_loaded: dict[str, Source] = {}  # by module, in the order of loading


def load(source: Source) -> None:
    """Run the file, unless this process has run it. Its exceptions are not caught."""
    if source.module in _loaded:
        return
    spec = spec_from_loader(source.module, _Loader(source))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[source.module] = module  # dataclasses and pickle look it up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[source.module]
        raise
    _loaded[source.module] = source


def read_and_load(entry: Any) -> dict[str, str]:
    """Load an entry of `training.plugins`; return the entry for the run's config.yaml.

    entry: a path, or {file: path, sha256: of its text} as a run's config.yaml has it
    Raises UserError.
    """
    given = entry if isinstance(entry, dict) else {"file": entry}
    path, expected = given.get("file"), given.get("sha256")
    if not isinstance(path, str) or not path:
        raise UserError(Problem(KEY, "must name Python files", entry, "use [path/to/file.py]"))
    file = os.path.abspath(os.path.expanduser(path))
    try:
        source = Source(file, read_text(file))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            Problem(
                KEY, f"must be a Python file that can be read: {reason}", file, "correct the path"
            )
        ) from error
    if expected not in (None, source.sha256):
        raise UserError(
            Problem(
                KEY,
                f"must be the file of sha256 {expected}, its sha256 is {source.sha256}",
                file,
                "put it back, or remove sha256",
            )
        )
    try:
        load(source)
    except (Exception, SystemExit) as error:
        raise UserError(
            Problem(
                KEY,
                f"must run without an error, {type(error).__name__} {_place(file, error)}: {error}",
                file,
                "correct the file",
            )
        ) from error
    return {"file": file, "sha256": source.sha256}


def _place(file: str, error: BaseException) -> str:
    """Say in which line of the file the error arose."""
    if isinstance(error, SyntaxError):
        return f"in line {error.lineno}"
    lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == file]
    return f"in line {lines[-1]}" if lines else "while loading"


def with_plugins(factory: Callable[..., T]) -> Callable[..., T]:
    """Wrap a factory for another process, which then runs the plugins of this process first."""
    return partial(_load_and_make, tuple(_loaded.values()), factory) if _loaded else factory


def _load_and_make(sources: tuple[Source, ...], factory: Callable[..., T], *args: Any) -> T:
    for source in sources:
        load(source)
    return factory(*args)
