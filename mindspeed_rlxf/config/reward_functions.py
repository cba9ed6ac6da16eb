"""Read the reward functions of the YAML: find each file, run it, check the signature."""

from __future__ import annotations

import sys
from typing import Any

from mindspeed_rlxf.config.draft import Draft, Tree
from mindspeed_rlxf.config.errors import Problem, UserError
from mindspeed_rlxf.config.keys import fields
from mindspeed_rlxf.config.reward_calls import find_broken_rule, find_function, split_name
from mindspeed_rlxf.config.schema import FunctionConfig
from mindspeed_rlxf.config.sources import Source, carry, load_error, read_source, run_as_module

FORM = "path/to/file.py:name"


def read_functions(draft: Draft, reward: Tree) -> None:
    """Complete the entries of `function` and `functions` in the section `reward`, in place.

    Runs their files in this process (not again if they have run), and registers the texts for the
    processes that score (`carry`). Wrong entries are rejected: `function` becomes None, and
    `functions` loses them. `functions` with a single entry becomes a list; if None, it is removed.
    """
    if reward.get("function") is not None:
        reward["function"] = _read_entry(draft, "reward.function", reward["function"])
    given = reward.get("functions")
    if given is None:
        reward.pop("functions", None)
    else:
        entries = given if isinstance(given, list) else [given]
        found = [_read_entry(draft, "reward.functions", entry) for entry in entries]
        reward["functions"] = [entry for entry in found if entry is not None]


def _read_entry(draft: Draft, key: str, given: Any) -> Any:
    """Return an entry as a dict with name, absolute path and SHA-256; None where it is rejected.

    The file is run. An unknown key becomes a problem and is left out. A built-in rule gets no path
    or hash, nor does an entry whose `function` is no text (default name `remote` with a `url`, else
    `function`).
    given: a text such as FORM, the name of a built-in rule, or a dict of keys of FunctionConfig
    """
    entry = {"function": given} if isinstance(given, str) else given
    if not isinstance(entry, dict):
        draft.reject(Problem(key, f"must name a function, {FORM}", given, "correct it"))
        return None
    texts = {str(name): value for name, value in entry.items()}  # keys in lists may be numbers
    entry = draft.keep_known(key, texts, fields(FunctionConfig))
    function = entry.get("function")
    if not isinstance(function, str):
        return {"name": "remote", **entry} if entry.get("url") else {"name": "function", **entry}
    try:
        return _complete_entry(key, entry, function)
    except UserError as error:
        for problem in error.problems:
            draft.reject(problem)
        return None


def _complete_entry(key: str, entry: Tree, function: str) -> Tree:
    """Return a copy of `entry` with the absolute path of its file, and the file's SHA-256.

    If the key `name` is absent, it becomes the name of the function. Other keys stay. A text
    without `.py` or `/` counts as a built-in rule, of which nothing but `name` is added. Runs the
    file, unless it has run in this process, and registers its text (`carry`).
    function: value of the key `function`
    Errors: UserError for a bad name, file (unreadable, another hash, an exception) or signature.
    """
    if (named := split_name(function)) is None or not named[1]:
        if ".py" in function or "/" in function:
            raise UserError(
                Problem(key, f"must name file and function, {FORM}", function, "add it")
            )
        return {"name": function, **entry}  # a built-in rule
    source = read_source(key, named[0], entry.get("sha256"))
    arguments = entry.get("arguments") or {}
    try:
        module = sys.modules.get(source.module) or run_as_module(source)
    except (Exception, SystemExit) as error:
        raise load_error(key, source.file, error) from error
    try:
        found = find_function(module, named[1])
    except ValueError as error:
        raise UserError(Problem(key, str(error), function, "correct the name")) from None
    if isinstance(arguments, dict) and (rule := find_broken_rule(found, arguments)):
        remedy = "correct the function or its arguments" if arguments else "correct the function"
        raise UserError(Problem(key, rule, function, remedy))
    carry(source)
    return {"name": named[1], **entry, **_path_and_hash(source, named[1])}


def _path_and_hash(source: Source, name: str) -> Tree:
    return {"function": f"{source.file}:{name}", "sha256": source.sha256}
