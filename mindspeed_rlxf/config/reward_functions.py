"""Read the reward functions of the YAML: find each file, run it, check the signature."""

import sys
from typing import Any

from mindspeed_rlxf.config.given import Tree
from mindspeed_rlxf.config.plugins import carry, load_error, read_source, run_as_module
from mindspeed_rlxf.config.problems import Problem, UserError
from mindspeed_rlxf.config.reward_section import check_call, find_function, split_name


def read_functions(problems: list[Problem], reward: Tree) -> None:
    """Complete the entries of `function` and `functions` in the section `reward`, in place.

    Runs their files in this process, and registers the texts for the processes that score
    (`carry`). A wrong entry becomes a problem and is left out.
    """
    for key in ("function", "functions"):
        given = reward.pop(key, None)
        found: list[Any] = []
        for entry in given if isinstance(given, list) else [] if given is None else [given]:
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
            rule = "must name file and function, path/to/file.py:name"
            raise UserError(Problem(key, rule, function, "add it"))
        return {"name": function, **entry}  # a built-in rule
    source = read_source(key, file, entry.get("sha256"))
    try:
        module = sys.modules.get(source.module) or run_as_module(source)
    except (Exception, SystemExit) as error:
        raise load_error(key, source.file, error) from error
    try:
        check_call(find_function(module, name), arguments)
    except ValueError as error:
        raise UserError(Problem(key, str(error), function, "correct it")) from None
    carry(source)
    own = {"function": f"{source.file}:{name}", "sha256": source.sha256}
    return {"name": name, **entry, **own}
