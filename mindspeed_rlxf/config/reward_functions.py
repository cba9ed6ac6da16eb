"""Read the reward functions of the YAML: find each file, run it, check the signature."""

import sys
from typing import Any

from mindspeed_rlxf.config.given import Tree
from mindspeed_rlxf.config.keys import unknown_key
from mindspeed_rlxf.config.plugins import carry, load_error, read_source, run_as_module
from mindspeed_rlxf.config.problems import Problem, UserError
from mindspeed_rlxf.config.reward_section import find_broken_rule, find_function, split_name
from mindspeed_rlxf.config.schema import FunctionConfig

FORM = "path/to/file.py:name"


def read_functions(problems: list[Problem], reward: Tree) -> None:
    """Complete the entries of `function` and `functions` in the section `reward`, in place.

    Runs their files in this process, and registers the texts for the processes that score
    (`carry`). A wrong entry becomes a problem and is left out.
    """
    if reward.get("function") is not None:
        reward["function"] = _read_entry(problems, "reward.function", reward["function"])
    entries = reward.pop("functions", None)
    if entries is not None:
        entries = entries if isinstance(entries, list) else [entries]
        found = [_read_entry(problems, "reward.functions", entry) for entry in entries]
        reward["functions"] = [entry for entry in found if entry is not None]


def _read_entry(problems: list[Problem], key: str, given: Any) -> Any:
    """Return an entry as a dict with name, absolute path and SHA-256; None if it is wrong.

    given: a text such as FORM, the name of a built-in rule, or a dict of keys of FunctionConfig
    """
    entry = {"function": given} if isinstance(given, str) else given
    if not isinstance(entry, dict):
        problems.append(Problem(key, f"must name a function, {FORM}", given, "correct it"))
        return None
    entry = {str(name): value for name, value in entry.items()}  # keys in lists may be numbers
    known = FunctionConfig.model_fields
    for name in sorted(entry.keys() - known.keys()):
        problems.append(unknown_key(key, name, known))
        del entry[name]
    function = entry.get("function")
    if not isinstance(function, str):
        return {"name": "remote", **entry} if entry.get("url") else {"name": "function", **entry}
    try:
        return _complete_entry(key, entry, function)
    except UserError as error:
        problems += error.problems
        return None


def _complete_entry(key: str, entry: Tree, function: str) -> Tree:
    """Return a copy of `entry` with the absolute path of its file, and the file's SHA-256.

    A text without `.py` or `/` counts as a built-in rule. Runs the file, unless it has run in this
    process, and registers its text (`carry`).
    function: value of the key `function`
    Errors: UserError for a bad name, file (unreadable, another hash, an exception) or signature.
    """
    file, name = split_name(function) or ("", "")
    if not name:
        if ".py" in function or "/" in function:
            rule = f"must name file and function, {FORM}"
            raise UserError(Problem(key, rule, function, "add it"))
        return {"name": function, **entry}  # a built-in rule
    source = read_source(key, file, entry.get("sha256"))
    arguments = entry.get("arguments") or {}
    try:
        module = sys.modules.get(source.module) or run_as_module(source)
    except (Exception, SystemExit) as error:
        raise load_error(key, source.file, error) from error
    try:
        found = find_function(module, name)
    except ValueError as error:
        raise UserError(Problem(key, str(error), function, "correct the name")) from None
    broken = find_broken_rule(found, arguments) if isinstance(arguments, dict) else None
    if broken:
        raise UserError(Problem(key, broken, function, "correct the function or its arguments"))
    carry(source)
    own = {"function": f"{source.file}:{name}", "sha256": source.sha256}
    return {"name": name, **entry, **own}
