"""Read plugins: Python files with estimators, reward rules, rollout engines and trackers.

The driver runs a file while it resolves the configuration, and sends the text to each worker, which
runs it before its first role; no other host needs the file. Registrations last as long as the
process. Reward functions' files are sent too, and run where they score.
"""

import hashlib
import inspect
import linecache
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any, TypeVar

from mindspeed_rlxf.config.problems import MissingFile, Problem, UserError
from mindspeed_rlxf.config.reward_section import check_call, find_function, split_name
from mindspeed_rlxf.config.tool_schema import PYTHON, describe_tool

MODULES = "rlxf_plugin_"
"""Module name prefix for user files."""


@dataclass(frozen=True)
class Source:
    """A user's Python file."""

    file: str  # on the driver's host
    text: str

    @property
    def sha256(self) -> str:
        """The text's SHA-256."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def module(self) -> str:
        """Module name for this text; the same file with another text gets another name."""
        return f"{MODULES}{Path(self.file).stem}_{self.sha256[:12]}"


def run_as_module(source: Source) -> ModuleType:
    """Run the file as a new module in this process, register it in `sys.modules` and return it.

    After an exception it is not registered.
    """
    code = compile(source.text, source.file, "exec", dont_inherit=True)
    lines = source.text.splitlines(keepends=True)
    # So that tracebacks show the lines on hosts that do not have the file.
    linecache.cache[source.file] = (len(source.text), None, lines, source.file)
    module = sys.modules[source.module] = ModuleType(source.module)  # dataclasses look it up
    module.__file__ = source.file
    try:
        exec(code, module.__dict__)
    except BaseException:
        del sys.modules[source.module]
        raise
    return module


def _run_file(key: str, path: str, expected: str | None) -> tuple[Source, ModuleType]:
    """Run a user's Python file, unless its text has run in this process.

    Args:
        key: Configuration key behind the file, for problems.
        path: Path to the file; `~` is expanded.
        expected: SHA-256 to require; None accepts any text.

    Raises:
        UserError: The file cannot be read, has another hash or raises an exception.
    """
    file = os.path.abspath(os.path.expanduser(path))
    try:
        source = Source(file, Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        rule = f"must be a Python file that can be read: {reason}"
        kind = MissingFile if isinstance(error, FileNotFoundError) else Problem
        raise UserError(kind(key, rule, file, "correct the path")) from error
    if expected not in (None, source.sha256):
        rule = f"must be the file of sha256 {expected}, its sha256 is {source.sha256}"
        raise UserError(Problem(key, rule, file, "put it back, or remove sha256"))
    try:
        return source, sys.modules.get(source.module) or run_as_module(source)
    except (Exception, SystemExit) as error:
        frames = [frame for frame in extract_tb(error.__traceback__) if frame.filename == file]
        location = f"in line {frames[-1].lineno}" if frames else "while loading"
        rule = f"must run without an error, {type(error).__name__} {location}: {error}"
        raise UserError(Problem(key, rule, file, "correct the file")) from error


_carried: dict[tuple[str, str], Source] = {}  # (file, SHA-256) -> text that workers also need


def carry(source: Source) -> None:
    """Register a source in this process, for `find_carried` and for workers."""
    _carried[source.file, source.sha256] = source


def find_carried(file: str, sha256: str) -> Source:
    """Return the source registered by `carry`. Raises KeyError if there is none."""
    return _carried[file, sha256]


T = TypeVar("T")

_loaded: dict[str, Source] = {}  # module name -> plugin, in the order of loading


def load(source: Source) -> None:
    """Run a plugin in this process, unless it has run. Its exceptions are not caught."""
    if source.module not in sys.modules:
        run_as_module(source)
    _loaded[source.module] = source


def loaded() -> tuple[Source, ...]:
    """Return this process's plugins in loading order."""
    return tuple(_loaded.values())


def read_entries(
    problems: list[Problem], path: str, section: dict[str, Any], complete: Callable[[str, Any], Any]
) -> None:
    """Complete a key's entries in place; a wrong entry becomes a problem and is dropped.

    Args:
        problems: List to extend.
        path: `training.plugins`, `reward.function`, `reward.functions`, `rollout.tools` or
            `rollout.program`.
        section: The section's keys; `section[key]` changes.
        complete: Called with path and entry; may raise UserError.
    """
    key = path.rpartition(".")[2]
    entries = section.pop(key, None)
    is_single = key in ("function", "program")
    if entries is None:
        entries = []
    elif is_single or not isinstance(entries, list):
        entries = [entries]
    completed = []
    for entry in entries:
        try:
            completed.append(complete(path, entry))
        except UserError as error:
            problems += error.problems
    if completed:
        section[key] = completed[0] if is_single else completed


def complete_plugin(key: str, entry: Any) -> Any:
    """Run an entry's plugin, once per process; return its absolute path and hash.

    Args:
        key: Configuration key, for problems.
        entry: A path, or {file: path, sha256: expected hash}; one with other keys is returned as
            is.

    Raises:
        UserError: The file cannot be read, has another hash or raises an exception.
    """
    fields = {"file": entry} if isinstance(entry, str) else entry
    if not isinstance(fields, dict) or not {"file"} <= fields.keys() <= {"file", "sha256"}:
        return fields
    source, _ = _run_file(key, str(fields["file"]), fields.get("sha256"))
    load(source)
    return {"file": source.file, "sha256": source.sha256}


def complete_function(key: str, spec: Any) -> Any:
    """Return an entry as a dict with name, absolute path and SHA-256; pydantic checks the rest.

    Text without `.py` or `/` names a built-in rule. A file runs, unless it has run in this process,
    and its text is registered (`carry`).

    Args:
        key: Configuration key, for problems.
        spec: `path/to/file.py:name`, a built-in rule's name, or FunctionConfig keys.

    Raises:
        UserError: Bad name, file (unreadable, another hash, an exception) or signature.
    """
    entry = {"function": spec} if isinstance(spec, str) else spec
    if not isinstance(entry, dict):
        return entry
    function = entry.get("function")
    arguments = entry.get("arguments") or {}
    if not isinstance(function, str) or not isinstance(arguments, dict):
        return {"name": "remote" if entry.get("url") else "function", **entry}
    file, name = split_name(function) or ("", "")
    if not name and (".py" in function or "/" in function):
        raise UserError(Problem(key, "must name a function, as file.py:name", function, "add it"))
    if not name:  # a built-in rule
        return {"name": function, **entry}
    source, module = _run_file(key, file, entry.get("sha256"))
    try:
        check_call(find_function(module, name), arguments)
    except ValueError as error:
        raise UserError(Problem(key, str(error), function, "correct it")) from None
    carry(source)
    resolved = {"function": f"{source.file}:{name}", "sha256": source.sha256}
    return {"name": name, **entry, **resolved}


def complete_tool(key: str, given: Any) -> Any:
    """Return an entry as a dict with absolute path and SHA-256; the tool `python` has neither.

    A file runs, unless it has run in this process, and its text is registered (`carry`).

    Args:
        key: Configuration key, for problems.
        given: `path/to/file.py:name`, `python`, or ToolConfig keys.

    Raises:
        UserError: Bad name, file (unreadable, another hash, an exception) or description.
    """
    entry = {"function": given} if isinstance(given, str) else given
    if not isinstance(entry, dict) or not isinstance(entry.get("function"), str):
        return entry
    function = entry["function"]
    if function == PYTHON:
        return entry
    file, name = split_name(function) or ("", "")
    if not name:
        remedy = "correct it"
        raise UserError(Problem(key, f"must be file.py:name, or {PYTHON}", function, remedy))
    source, module = _run_file(key, file, entry.get("sha256"))
    try:
        describe_tool(find_function(module, name))
    except ValueError as error:
        raise UserError(Problem(key, str(error), function, "correct it")) from None
    carry(source)
    return {**entry, "function": f"{source.file}:{name}", "sha256": source.sha256}


def complete_program(key: str, given: Any) -> Any:
    """Return an entry as a dict: a function with absolute path and SHA-256, a command with folder.

    A function's file runs, unless it has run in this process, and its text is registered (`carry`).

    Args:
        key: Configuration key, for problems.
        given: `path/to/file.py:name`, a command line, or ProgramConfig keys.

    Raises:
        UserError: Bad file (unreadable, another hash, an exception), function or command line.
    """
    entry = {"run": given} if isinstance(given, str) else given
    if not isinstance(entry, dict) or not isinstance(entry.get("run"), str):
        return entry
    run = entry["run"]
    file, name = split_name(run) or ("", "")
    try:
        if not name and not shlex.split(run):
            raise ValueError("must be a function, file.py:name, or a command")
        if not name:
            return {"folder": os.getcwd(), **entry}
        source, module = _run_file(key, file, entry.get("sha256"))
        inspect.signature(find_function(module, name)).bind({})
    except (ValueError, TypeError) as error:
        raise UserError(Problem(key, f"{error}", run, "correct it")) from None
    carry(source)
    return {**entry, "run": f"{source.file}:{name}", "sha256": source.sha256}


def with_plugins(factory: Callable[..., T]) -> Callable[..., T]:
    """Return a callable for another process: it loads this process's plugins, then calls `factory`.

    It also registers the texts behind reward functions (`carry`), passes its arguments on, and can
    be pickled if `factory` can.
    """
    plugins = loaded()
    functions = tuple(_carried.values())
    if not plugins and not functions:
        return factory
    return partial(_load_and_make, plugins, functions, factory)


def _load_and_make(
    plugins: tuple[Source, ...],
    functions: tuple[Source, ...],
    factory: Callable[..., T],
    *args: Any,
) -> T:
    for source in plugins:
        load(source)
    for source in functions:
        carry(source)
    return factory(*args)
