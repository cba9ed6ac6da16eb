"""Python files of the user that add estimators, reward rules and rollout engines (docs/plugins.md).

The driver runs a file when the configuration is made. It sends the text to each worker, which runs
it before it builds its first role. What a file registers lasts as long as the process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from mindspeed_rlxf.config.errors import Problem, UserError
from mindspeed_rlxf.config.sources import (
    Source,
    carry,
    list_carried,
    load_error,
    read_source,
    run_as_module,
    split_entry,
)

KEY = "training.plugins"
KEYS = ("file", "sha256")  # of an entry
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


def read_and_load(entry: Any) -> dict[str, str]:
    """Run the plugin of an entry of `training.plugins`; return its absolute path and hash.

    Not run again if it has run in this process. Returns {file: path, sha256: hash of the text}.
    entry: a path, or {file: path, sha256: expected hash of the text}
    Errors: UserError where the entry has no path or another key, the file cannot be read, has
    another hash or raises an exception (SystemExit included).
    """
    path, expected = split_entry(entry, "file")
    if not isinstance(path, str) or not path:
        raise UserError(Problem(KEY, "must name Python files", entry, "use [path/to/file.py]"))
    if isinstance(entry, dict) and (unknown := [str(key) for key in entry if key not in KEYS]):
        rule = f"must have the keys {' and '.join(KEYS)} only, {', '.join(unknown)} is none of them"
        raise UserError(Problem(KEY, rule, entry, "correct or remove it"))
    source = read_source(KEY, path, expected)
    try:
        load(source)
    except (Exception, SystemExit) as error:
        raise load_error(KEY, source.file, error) from error
    return {"file": source.file, "sha256": source.sha256}


def with_plugins(factory: Callable[..., T]) -> Callable[..., T]:
    """Return a callable for another process, which calls `factory` with the arguments it gets.

    Before that it runs there the plugins that this process has run by now (`load`), and registers
    the texts of reward functions (`carry`). It can be pickled if `factory` can. Without plugins and
    texts `factory` itself is returned.
    """
    plugins, others = loaded(), list_carried()
    return partial(_load_and_make, plugins, others, factory) if plugins or others else factory


def _load_and_make(
    plugins: tuple[Source, ...], others: tuple[Source, ...], factory: Callable[..., T], *args: Any
) -> T:
    for source in plugins:
        load(source)
    for source in others:
        carry(source)
    return factory(*args)
