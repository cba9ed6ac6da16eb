"""The configuration before its types are checked: plain values, their YAML keys, and problems."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from mindspeed_rlxf.config.errors import Problem
from mindspeed_rlxf.config.keys import unknown_key
from mindspeed_rlxf.config.suggest import format_value

Tree: TypeAlias = dict[str, Any]


def set_default(section: Tree, key: str, value: Any) -> None:
    """Set a key of `section` in place where it is absent or None."""
    if section.get(key) is None:
        section[key] = value


def yaml_parts(loc: Sequence[int | str]) -> list[str]:
    """Return a pydantic location as strings, without `architecture` or `optimizer` at index 1.

    The YAML writes the keys of these two sections directly into the section of a role.
    """
    return [
        str(part)
        for depth, part in enumerate(loc)
        if depth != 1 or part not in ("architecture", "optimizer")
    ]


@dataclass
class Draft:
    """Untyped values in the shape of RunConfig, and the problems found while making them."""

    payload: Tree = field(default_factory=dict)
    origins: dict[tuple[str, str], str] = field(default_factory=dict)  # (section, key) -> YAML key
    spelled: dict[str, str] = field(default_factory=dict)  # key -> YAML key, where moved or renamed
    problems: list[Problem] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)  # YAML keys that later rules must not judge
    notes: dict[str, list[str]] = field(default_factory=dict)  # remark -> keys it applies to

    def reject(self, problem: Problem, path: str = "") -> None:
        """Add a problem, and mark as broken the key `path` if given, else the problem's key."""
        self.problems.append(problem)
        self.broken.add(path or problem.key)

    def note(self, meaning: str, key: str) -> None:
        """Add `key` to the keys of the remark `meaning`, unless it is among them already.

        key: a legal key, or `key=value`; all keys of one remark share a line
        """
        keys = self.notes.setdefault(meaning, [])
        if key not in keys:
            keys.append(key)

    def add_problems(self, found: Iterable[Problem]) -> None:
        """Add the problems that depend on no broken key, with keys spelled as in the YAML.

        The others are left out, as they may follow from the broken key.
        """
        for problem in found:
            if not problem.depends_on(self.broken):
                self.problems.append(problem.rename_keys(lambda key: self.path(key.split("."))))

    def path(self, loc: Sequence[int | str]) -> str:
        """Return the dotted key, as the user wrote it, of a location in the payload.

        The key that `origins` names for the value; else `model.<name>.<key>` for an architecture
        key; else the location itself by `yaml_parts`, with `resource_pool` for `pool_settings`.
        """
        parts = yaml_parts(loc)
        parts[0] = parts[0].replace("pool_settings", "resource_pool")
        role, key, part = (*parts, "", "", "")[:3]
        if (f"{role}.{key}", part) in self.origins:
            return ".".join([self.origins[f"{role}.{key}", part], *parts[3:]])
        if (role, key) in self.origins:
            return ".".join([self.origins[role, key], *parts[2:]])
        if "architecture" in loc and len(parts) > 1:
            return f"model.{self.payload[role]['model']}.{key}"
        return ".".join(parts)

    def mapping(self, path: str, value: Any) -> Tree:
        """Return `value` if it is a dict, else {}; None is legal, other values are rejected.

        path: key of the value, for the problem
        """
        if value is None or isinstance(value, dict):
            return value or {}
        self.reject(
            Problem(
                path, "must be a section of keys", format_value(value), "write `key: value` lines"
            )
        )
        return {}

    def keep_known(self, section: str, values: Tree, keys: set[str]) -> Tree:
        """Return the part of `values` with names in `keys`; add a problem for each other name."""
        for name in sorted(values.keys() - keys):
            path = self.spelled.get(f"{section}.{name}", "")
            self.problems.append(unknown_key(section, name, keys, path))
        return {name: value for name, value in values.items() if name in keys}


class Dialect(Protocol):
    """Translates the YAML of another toolkit before the values are typed; see `compat`."""

    def translate(self, draft: Draft, sections: Tree, nested: bool) -> None:
        """Replace the other toolkit's keys in `sections` in place; report problems to the draft.

        sections: keys with underscores, roles at the top level
        nested:   the tree has `actor_rollout_ref`
        """

    def add_vocab_size(self, draft: Draft, sections: Tree, model: str, architecture: Tree) -> None:
        """Set an absent `vocab_size` of `architecture` (`model.<model>`), or reject its key."""
