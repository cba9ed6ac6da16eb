"""The configuration before it is typed: plain values, where they came from, what is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from mindspeed_rlxf.config.errors import Problem
from mindspeed_rlxf.config.keys import unknown_key
from mindspeed_rlxf.config.suggest import written

Tree: TypeAlias = dict[str, Any]


def set_default(section: Tree, key: str, value: Any) -> None:
    """Where the YAML is silent about `key`, or says null."""
    if section.get(key) is None:
        section[key] = value


@dataclass
class Draft:
    """Untyped values in the shape of RunConfig, and what was wrong on the way."""

    payload: Tree = field(default_factory=dict)
    origins: dict[tuple[str, str], str] = field(default_factory=dict)  # (role, key) -> YAML key
    spelled: dict[str, str] = field(default_factory=dict)  # usual key -> as the YAML nests it
    problems: list[Problem] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)  # YAML keys that later rules must not judge
    notes: dict[str, list[str]] = field(default_factory=dict)  # what it means -> of which keys

    def reject(self, problem: Problem, path: str = "") -> None:
        """path: what is broken, where it is not the problem's key"""
        self.problems.append(problem)
        self.broken.add(path or problem.key)

    def note(self, meaning: str, key: str) -> None:
        """A legal key whose meaning here is worth a line; said once for all keys it is true of."""
        keys = self.notes.setdefault(meaning, [])
        if key not in keys:
            keys.append(key)

    def judge(self, found: Iterable[Problem]) -> None:
        """Keeps the problems of rules that depend on no broken key, in keys as the user wrote
        them."""
        for problem in found:
            if not problem.judges(self.broken):
                self.problems.append(problem.spelled(lambda key: self.path(key.split("."))))

    def note_lines(self) -> list[str]:
        return [f"{', '.join(keys)}: {meaning}" for meaning, keys in self.notes.items()]

    def path(self, loc: Sequence[int | str]) -> str:
        """The YAML key that a place in the payload came from."""
        parts = [str(part) for part in loc if part not in ("architecture", "optimizer")]
        if parts[0] == "pool_settings":
            return ".".join(["resource_pool", *parts[1:]])
        role, key = (*parts, "", "")[:2]
        if (role, key) in self.origins:
            return ".".join([self.origins[role, key], *parts[2:]])
        if "architecture" in loc and len(parts) > 1:
            return f"model.{self.payload[role]['model']}.{key}"
        return ".".join(parts)

    def mapping(self, path: str, value: Any) -> Tree:
        """The keys of a section; an error, and no keys, where it is not one."""
        if value is None or isinstance(value, dict):
            return value or {}
        self.reject(
            Problem(path, "must be a section of keys", written(value), "write `key: value` lines")
        )
        return {}

    def known(self, section: str, values: Tree, keys: set[str]) -> Tree:
        """The values whose keys the section has; an error for each of the others."""
        for name in sorted(values.keys() - keys):
            path = self.spelled.get(f"{section}.{name}", "")
            self.problems.append(unknown_key(section, name, keys, path))
        return {name: value for name, value in values.items() if name in keys}


class Dialect(Protocol):
    """Words of another toolkit, translated before the values are typed; see `compat`."""

    def translate(self, draft: Draft, sections: Tree, nested: bool) -> None:
        """sections: underscored, roles at the top. nested: the tree has `actor_rollout_ref`."""

    def tokenizer_vocabulary(
        self, draft: Draft, sections: Tree, model: str, architecture: Tree
    ) -> None:
        """Add `vocab_size` to an architecture of the YAML that leaves it out."""
