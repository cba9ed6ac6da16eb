"""Compare the configuration of a run with the one that resumes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from mindspeed_rlxf.config.fields import Resume, extra_of
from mindspeed_rlxf.config.keys import REMOVED, find_field
from mindspeed_rlxf.config.secrets import url_secret, variable_secret

ABSENT = object()
COMMAND_KEYS = {"training.new_run", "training.resume", "dry_run"}
"""Keys that belong to one command, not to the run."""
VARIABLES = ("resource_pool", "env")


@dataclass(frozen=True)
class Change:
    """A key whose value differs; ABSENT = none. rule: whether a resumed run accepts it, `Resume`"""

    key: str
    before: Any
    now: Any
    rule: Resume

    def __str__(self) -> str:
        before, now = ("absent" if v is ABSENT else repr(v) for v in (self.before, self.now))
        return f"{self.key}: {before} -> {now}"


def find_changes(before: dict[str, Any], now: dict[str, Any]) -> list[Change]:
    """Return the keys that differ, in the order of `now`, then those that only `before` has.

    COMMAND_KEYS, and keys that this version has no more, are left out.
    before, now: nested dicts of `dump.to_tree` in plain YAML types. A key that one of them lacks,
    because another version of the package wrote it, counts as its default; as ABSENT if it has
    none or this version does not know it. Secret values of environment variables are masked. With
    `reward.allow_changed_function` in `now`, a changed text of a reward function has the rule
    "free".
    """
    old, new = dict(_iterate_leaves(before)), dict(_iterate_leaves(now))
    found = []
    for path in [*new, *(path for path in old if path not in new)]:
        was, will = old.get(path, ABSENT), new.get(path, ABSENT)
        field = find_field(path)
        if field is not None and not field.is_required():
            default = _to_plain(field.get_default(call_default_factory=True))
            was, will = (default if v is ABSENT else v for v in (was, will))
        key = ".".join(path)
        was, will = _hide_secrets(path, was), _hide_secrets(path, will)
        gone = key in REMOVED and will is ABSENT
        if was != will and key not in COMMAND_KEYS and not gone:
            allowed = now.get("reward", {}).get("allow_changed_function") is True
            change = Change(key, was, will, extra_of(field).get("resume", "fixed"))
            free = (allowed and is_function_text(change)) or _is_address(change)
            found.append(replace(change, rule="free") if free else change)
    return found


def is_function_text(change: Change) -> bool:
    """Return whether a change is only of the hash of reward function files, and of nothing else.

    False if a function is new or gone.
    """
    if change.key == "reward.function.sha256":
        return isinstance(change.before, str) and isinstance(change.now, str)
    both = change.before, change.now
    if change.key != "reward.functions" or not all(isinstance(side, list) for side in both):
        return False
    return _without(change.before, "sha256") == _without(change.now, "sha256")


def _is_address(change: Change) -> bool:
    """Return whether only addresses and headers of reward servers differ."""
    if change.key.startswith(("reward.function.url", "reward.function.headers")):
        return change.before is not None and change.now is not None
    both = change.before, change.now
    if change.key != "reward.functions" or not all(isinstance(side, list) for side in both):
        return False
    kinds = [[isinstance(e, dict) and bool(e.get("url")) for e in side] for side in both]
    before, now = (_without(side, "url", "headers") for side in both)
    return kinds[0] == kinds[1] and before == now


def _without(entries: list[Any], *keys: str) -> list[Any]:
    return [{**e, **dict.fromkeys(keys)} if isinstance(e, dict) else e for e in entries]


def _hide_secrets(path: tuple[str, ...], value: Any) -> Any:
    """Hide secrets in the value of a key, which older versions of the package wrote to files."""
    if isinstance(value, str) and "${" not in value:
        if path[:-1] == VARIABLES:
            return str(variable_secret(path[-1], value))
        return str(url_secret(value)) if path == ("reward", "function", "url") else value
    if path == ("reward", "functions") and isinstance(value, list):
        address = ("reward", "function", "url")
        return [
            {**e, "url": _hide_secrets(address, e.get("url"))} if isinstance(e, dict) else e
            for e in value
        ]
    return value


def _iterate_leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (path of keys, value) of each leaf of nested dicts; an empty dict is a leaf.

    A leaf at the top (empty `path`) is not yielded. Keys become texts.
    """
    if isinstance(tree, dict) and tree:
        for name, item in tree.items():
            yield from _iterate_leaves(item, (*path, str(name)))
    elif path:
        yield path, tree


def _to_plain(value: Any) -> Any:
    """Convert a default to plain YAML types: tuples to lists, enums to their values.

    Other values, lists and dicts too, stay as they are.
    """
    if isinstance(value, tuple):
        return [_to_plain(item) for item in value]
    return getattr(value, "value", value)
