"""Read plugins: Python files that add estimators, rules, rollout engines and trackers.

The driver runs a file when the configuration is made. It sends the text to each worker, which runs
it before it builds its first role, so no other host needs the file. What a file registers lasts as
long as the process. Files of reward functions are sent too, and run where they score.
"""

import hashlib
import linecache
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


def read_source(key: str, path: str, expected: str | None = None) -> Source:
    """Return the text of the Python file `path`, with its absolute path; `~` is expanded.

    Args:
        key: of the configuration that names the file, for problems.
        expected: SHA-256 that the text must have; None = any.

    Raises:
        UserError: the file cannot be read or has another hash.
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


@contextmanager
def naming_errors(key: str, file: str) -> Iterator[None]:
    """Raise an exception of the user's `file` as a UserError that names its line there.

    Args:
        key: of the configuration that names the file.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        lines = [each.lineno for each in extract_tb(error.__traceback__) if each.filename == file]
        if isinstance(error, SyntaxError) and error.filename == file:
            lines.append(error.lineno)
        place = f"in line {lines[-1]}" if lines and lines[-1] else "while loading"
        rule = f"must run without an error, {type(error).__name__} {place}: {error}"
        raise UserError(Problem(key, rule, file, "correct the file")) from error


_carried: dict[tuple[str, str], Source] = {}  # (file, SHA-256) -> text that workers also need


def carry(source: Source) -> None:
    """Register a source in this process for `find_carried`, and for sending to workers."""
    _carried[source.file, source.sha256] = source


def find_carried(file: str, sha256: str) -> Source:
    """Return the source registered by `carry`. KeyError if there is none."""
    return _carried[file, sha256]


KEY = "training.plugins"
T = TypeVar("T")

_loaded: dict[str, Source] = {}  # module name -> plugin, in the order of loading


def load(source: Source) -> None:
    """Run a plugin in this process, unless it has run already. Its exceptions are not caught."""
    if source.module not in _loaded:
        run_as_module(source)
        _loaded[source.module] = source


def loaded() -> tuple[Source, ...]:
    """Return the plugins that ran in this process, in the order of loading."""
    return tuple(_loaded.values())


def read_and_load(entry: Any) -> Any:
    """Run the plugin of an entry of `training.plugins`; return its absolute path and hash.

    Not run again if it has run in this process. An entry with wrong keys is returned as it is.

    Args:
        entry: a path, or {file: path, sha256: expected hash of the text}.

    Raises:
        UserError: the file cannot be read, has another hash or raises an exception.
    """
    given = {"file": entry} if isinstance(entry, str) else entry
    if not isinstance(given, dict) or not {"file"} <= given.keys() <= {"file", "sha256"}:
        return given
    source = read_source(KEY, str(given["file"]), given.get("sha256"))
    with naming_errors(KEY, source.file):
        load(source)
    return {"file": source.file, "sha256": source.sha256}


def read_functions(problems: list[Problem], reward: dict[str, Any]) -> None:
    """Complete the entries of `function` and `functions` in the section `reward`, in place.

    Runs their files in this process, and registers the texts for the processes that score
    (`carry`). A wrong entry becomes a problem and is left out.
    """
    for key in ("function", "functions"):
        given, found = reward.pop(key, None), []
        several = key == "functions" and isinstance(given, list)
        for entry in given if several else [] if given is None else [given]:
            try:
                found.append(_complete_entry(f"reward.{key}", entry))
            except UserError as error:
                problems += error.problems
        if found:
            reward[key] = found[0] if key == "function" else found


def _complete_entry(key: str, given: Any) -> Any:
    """Return an entry as a dict with name, absolute path and SHA-256; pydantic checks the rest.

    A text without `.py` or `/` counts as a built-in rule. Runs the file, unless it has run in this
    process, and registers its text (`carry`).

    Args:
        given: `path/to/file.py:name`, the name of a built-in rule, or keys of FunctionConfig.

    Raises:
        UserError: bad name, file (unreadable, another hash, an exception) or signature.
    """
    entry = {"function": given} if isinstance(given, str) else given
    if not isinstance(entry, dict):
        return entry
    entry = {str(name): value for name, value in entry.items()}  # keys in lists may be numbers
    function, arguments = entry.get("function"), entry.get("arguments") or {}
    if not isinstance(function, str) or not isinstance(arguments, dict):
        return {"name": "remote" if entry.get("url") else "function", **entry}
    file, name = split_name(function) or ("", "")
    if not name:
        if ".py" in function or "/" in function:
            raise UserError(
                Problem(key, "must name a function, as file.py:name", function, "add it")
            )
        return {"name": function, **entry}  # a built-in rule
    source = read_source(key, file, entry.get("sha256"))
    with naming_errors(key, source.file):
        module = sys.modules.get(source.module) or run_as_module(source)
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
