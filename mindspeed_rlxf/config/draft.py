"""The configuration before it is typed: plain values, their YAML keys, and problems so far."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from mindspeed_rlxf.config.errors import Problem
from mindspeed_rlxf.config.keys import unknown_key
from mindspeed_rlxf.config.suggest import format_value

Tree: TypeAlias = dict[str, Any]


def set_default(section: Tree, key: str, value: Any) -> None:
    """Set a key that the YAML leaves out or sets to null."""
    if section.get(key) is None:
        section[key] = value


def flat_place(loc: Sequence[int | str]) -> list[str]:
    """Return a place in the payload without the parts that the YAML lays flat into a role."""
    return [
        str(part)
        for depth, part in enumerate(loc)
        if depth != 1 or part not in ("architecture", "optimizer")
    ]


@dataclass
class Draft:
    """Untyped values in the shape of RunConfig, and the problems found while making them."""

    payload: Tree = field(default_factory=dict)
    origins: dict[tuple[str, str], str] = field(default_factory=dict)  # (role, key) -> YAML key
    spelled: dict[str, str] = field(default_factory=dict)  # usual key -> as the YAML nests it
    problems: list[Problem] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)  # YAML keys that later rules must not judge
    notes: dict[str, list[str]] = field(default_factory=dict)  # what it means -> of which keys

    def reject(self, problem: Problem, path: str = "") -> None:
        """Add a problem and mark its key as broken. path: the broken key, if it is another"""
        self.problems.append(problem)
        self.broken.add(path or problem.key)

    def note(self, meaning: str, key: str) -> None:
        """Add a legal key to the note of this meaning, which is printed once for all its keys."""
        keys = self.notes.setdefault(meaning, [])
        if key not in keys:
            keys.append(key)

    def add_problems(self, found: Iterable[Problem]) -> None:
        """Keep the problems that depend on no broken key, with keys as the user wrote them."""
        for problem in found:
            if not problem.depends_on(self.broken):
                self.problems.append(problem.rename_keys(lambda key: self.path(key.split("."))))

    def path(self, loc: Sequence[int | str]) -> str:
        """Return the YAML key of a place in the payload."""
        parts = flat_place(loc)
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
        """Return the keys of a section; reject a value that is no section."""
        if value is None or isinstance(value, dict):
            return value or {}
        self.reject(
            Problem(
                path, "must be a section of keys", format_value(value), "write `key: value` lines"
            )
        )
        return {}

    def known(self, section: str, values: Tree, keys: set[str]) -> Tree:
        """Return the values of keys that the section has; add a problem for each other key."""
        for name in sorted(values.keys() - keys):
            path = self.spelled.get(f"{section}.{name}", "")
            self.problems.append(unknown_key(section, name, keys, path))
        return {name: value for name, value in values.items() if name in keys}


class Dialect(Protocol):
    """Translates the YAML of another toolkit before the values are typed; see `compat`."""

    def translate(self, draft: Draft, sections: Tree, nested: bool) -> None:
        """Change the sections in place.

        sections: keys with underscores, roles at the top level
        nested:   the tree has `actor_rollout_ref`
        """

    def tokenizer_vocabulary(
        self, draft: Draft, sections: Tree, model: str, architecture: Tree
    ) -> None:
        """Add `vocab_size` to an architecture of the YAML that leaves it out."""
