"""Read plugins: Python files that add estimators, rules, rollout engines and trackers.

The driver runs a file when the configuration is made. It sends the text to each worker, which runs
it before it builds its first role, so no other host needs the file. What a file registers lasts as
long as the process. Files of reward functions are sent too, and run where they score.
"""

import hashlib
import linecache
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any, TypeVar

from mindspeed_rlxf.config.problems import Problem, UserError
from mindspeed_rlxf.config.reward_section import check_call, find_function, split_name

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


def run_as_module(source: Source) -> ModuleType:
    """Run the file as a new module of this process, put it in `sys.modules` and return it.

    The module is not in `sys.modules` after an exception.
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
    """Run a Python file of the user, unless its text has run in this process.

    Args:
        key: of the configuration that names the file, for problems.
        path: of the file; `~` is expanded.
        expected: SHA-256 that the text must have; None = any.

    Raises:
        UserError: the file cannot be read, has another hash or raises an exception.
    """
    file = os.path.abspath(os.path.expanduser(path))
    try:
        source = Source(file, Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        rule = f"must be a Python file that can be read: {reason}"
        raise UserError(Problem(key, rule, file, "correct the path")) from error
    if expected not in (None, source.sha256):
        rule = f"must be the file of sha256 {expected}, its sha256 is {source.sha256}"
        raise UserError(Problem(key, rule, file, "put it back, or remove sha256"))
    try:
        return source, sys.modules.get(source.module) or run_as_module(source)
    except (Exception, SystemExit) as error:
        lines = [each.lineno for each in extract_tb(error.__traceback__) if each.filename == file]
        place = f"in line {lines[-1]}" if lines else "while loading"
        rule = f"must run without an error, {type(error).__name__} {place}: {error}"
        raise UserError(Problem(key, rule, file, "correct the file")) from error


_carried: dict[tuple[str, str], Source] = {}  # (file, SHA-256) -> text that workers also need


def carry(source: Source) -> None:
    """Register a source in this process for `find_carried`, and for sending to workers."""
    _carried[source.file, source.sha256] = source


def find_carried(file: str, sha256: str) -> Source:
    """Return the source registered by `carry`. KeyError if there is none."""
    return _carried[file, sha256]


T = TypeVar("T")

_loaded: dict[str, Source] = {}  # module name -> plugin, in the order of loading


def load(source: Source) -> None:
    """Run a plugin in this process, unless it has run already. Its exceptions are not caught."""
    if source.module not in sys.modules:
        run_as_module(source)
    _loaded[source.module] = source


def loaded() -> tuple[Source, ...]:
    """Return the plugins that ran in this process, in the order of loading."""
    return tuple(_loaded.values())


def read_entries(
    problems: list[Problem], path: str, section: dict[str, Any], complete: Callable[[str, Any], Any]
) -> None:
    """Replace the entries of a key by what `complete` returns, `section[key]` in place.

    A wrong entry becomes a problem and is left out.

    Args:
        path: `training.plugins`, `reward.function` or `reward.functions`.
        complete: called with the path and an entry; may raise UserError.
    """
    key = path.rpartition(".")[2]
    given, found = section.pop(key, None), []
    several = isinstance(given, list) and key != "function"
    for entry in given if several else [] if given is None else [given]:
        try:
            found.append(complete(path, entry))
        except UserError as error:
            problems += error.problems
    if found:
        section[key] = found[0] if key == "function" else found


def complete_plugin(key: str, entry: Any) -> Any:
    """Run the plugin of an entry, once in a process; return its absolute path and hash.

    Args:
        key: of the configuration, for problems.
        entry: a path, or {file: path, sha256: expected hash}; one with other keys is returned.

    Raises:
        UserError: the file cannot be read, has another hash or raises an exception.
    """
    given = {"file": entry} if isinstance(entry, str) else entry
    if not isinstance(given, dict) or not {"file"} <= given.keys() <= {"file", "sha256"}:
        return given
    source, _ = _run_file(key, str(given["file"]), given.get("sha256"))
    load(source)
    return {"file": source.file, "sha256": source.sha256}


def complete_function(key: str, given: Any) -> Any:
    """Return an entry as a dict with name, absolute path and SHA-256; pydantic checks the rest.

    A text without `.py` or `/` counts as a built-in rule. Runs the file, unless it has run in this
    process, and registers its text (`carry`).

    Args:
        key: of the configuration that has the entry.
        given: `path/to/file.py:name`, the name of a built-in rule, or keys of FunctionConfig.

    Raises:
        UserError: bad name, file (unreadable, another hash, an exception) or signature.
    """
    entry = {"function": given} if isinstance(given, str) else given
    if not isinstance(entry, dict):
        return entry
    function, arguments = entry.get("function"), entry.get("arguments") or {}
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
    own = {"function": f"{source.file}:{name}", "sha256": source.sha256}
    return {"name": name, **entry, **own}


def with_plugins(factory: Callable[..., T]) -> Callable[..., T]:
    """Return a callable for another process, which calls `factory` with the arguments it gets.

    Before that it runs there the plugins that this process has run by now (`load`), and registers
    the texts of reward functions (`carry`). It can be pickled if `factory` can.
    """
    plugins, others = loaded(), tuple(_carried.values())
    return partial(_load_and_make, plugins, others, factory) if plugins or others else factory


def _load_and_make(
    plugins: tuple[Source, ...], others: tuple[Source, ...], factory: Callable[..., T], *args: Any
) -> T:
    for source in plugins:
        load(source)
    for source in others:
        carry(source)
    return factory(*args)
