"""The sections of the YAML as the user wrote them, with problems and notes found on the way."""

from collections.abc import Mapping
from typing import Any, TypeAlias

from mindspeed_rlxf.config.enums import CONFIGURED
from mindspeed_rlxf.config.keys import NESTED_ROLES, TOP_LEVEL, unknown_key
from mindspeed_rlxf.config.problems import Problem, format_value, ref

Tree: TypeAlias = dict[str, Any]

VERBATIM = ("model", "resource_pool", "rules", "arguments", "chat_template_kwargs")
"""Sections whose keys are names that the user chose."""
OLDER_ACTOR = "actor"
NESTED = {"actor_rollout": "actor_rollout", OLDER_ACTOR: "actor_rollout", "ref": "ref"}
"""Section below `actor_rollout_ref` -> role."""
ROLES = tuple(role.value for role in CONFIGURED)


def set_default(section: Tree, **defaults: Any) -> None:
    """Set those keys of `section` in place that are absent or None."""
    section |= {key: value for key, value in defaults.items() if section.get(key) is None}


class Given:
    """The YAML's sections, each a dict with underscores in its keys.

    Attributes:
        sections: section -> its keys; `dry_run` -> its value.
        renamed: `section.key` -> the key in the file, for keys written elsewhere or otherwise.
        problems: mistakes found.
        notes: text -> `key=value` of the keys it is about; one line each.
        nested: whether the YAML has the older nesting `actor_rollout_ref`.
    """

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self.problems: list[Problem] = []
        self.renamed: dict[str, str] = {}
        self.notes: dict[str, dict[str, None]] = {}
        sections = self._underscore(tree, "")
        self.nested = NESTED_ROLES in sections
        if isinstance(sections.get("runtime"), str):
            sections["runtime"] = {"kind": sections["runtime"]}
        older = sections.pop(OLDER_ACTOR, None)
        for name in sorted(sections.keys() - TOP_LEVEL):
            self.problems.append(unknown_key("", name, TOP_LEVEL))
        self.sections: Tree = {"dry_run": sections.get("dry_run", False)}
        for name in TOP_LEVEL - {"dry_run"}:
            self.sections[name] = self.as_section(name, sections.get(name))
        self._move_section(OLDER_ACTOR, "actor_rollout", older)
        for role, values in self.sections.pop(NESTED_ROLES).items():
            if role in NESTED:
                self._move_section(f"{NESTED_ROLES}.{role}", NESTED[role], values)
            else:
                self.problems.append(unknown_key(NESTED_ROLES, role, {*NESTED.values()}))
        self.sections["model"] = {
            str(name): self._underscore(self.as_section(f"model.{name}", keys), f"model.{name}.")
            for name, keys in self.sections["model"].items()
        }

    def note(self, meaning: str, key: str) -> None:
        """Add `key` (or `key=value`) to the note `meaning`."""
        self.notes.setdefault(meaning, {})[key] = None

    def as_section(self, path: str, value: Any) -> Tree:
        """Return a copy of a dict; for None, or other values, which are reported, an empty one."""
        if value is None or isinstance(value, dict):
            return {**(value or {})}
        self.refuse(path, "must be a section of keys", value, "write `key: value` lines under it")
        return {}

    def refuse(self, path: str, rule: str, value: Any, remedy: str) -> None:
        """Add the problem of a key with a wrong value."""
        self.problems.append(Problem(path, rule, format_value(value), remedy))

    def model_of(self, role: str) -> Any:
        """Return the `model` of a role, its own or that of `training`.

        `auto` if neither names one and the YAML has no section `model`.
        """
        own, training = self.sections[role], self.sections["training"]
        default = None if self.sections["model"] else "auto"
        return own.get("model", training.get("model", default))

    def value(self, role: str, key: str) -> Any:
        """Return a role's value: its own, else that of `training`, else of its model, else None."""
        return next((home[key] for home in self.homes(role).values() if key in home), None)

    def written(self, path: str) -> str:
        """Return the key in the user's file that sets `section.key`, for messages.

        The role's own key if the file has it, else `training.KEY` or `model.NAME.KEY`.
        """
        section, *keys = path.split(".")
        section = "resource_pool" if section == "pool_settings" else section
        of_architecture = keys[:1] == ["architecture"]
        keys = keys[of_architecture:]
        if section in ROLES and keys:
            homes = self.homes(section)
            found = [
                name
                for name, values in homes.items()
                if keys[0] in values  # which may be a section of its own, as `offload`
                and (len(keys) == 1 or values[keys[0]] is None or keys[1] in values[keys[0]])
            ]
            absent = [*homes][-1] if of_architecture else section
            section = found[0] if found else absent
        parts = [*section.split("."), *keys]
        for end in range(len(parts), 1, -1):
            if home := self.renamed.get(".".join(parts[:end])):
                return ".".join((home, *parts[end:]))
        return ".".join(parts)

    def homes(self, role: str) -> dict[str, Tree]:
        """Return the sections that set a role's keys by name; the first has precedence."""
        model = str(self.model_of(role))
        own, training = self.sections[role], self.sections["training"]
        shared = self.sections["model"].get(model, {})
        return {role: own, "training": training, f"model.{model}": shared}

    def _underscore(self, tree: Mapping[Any, Any], prefix: str) -> Tree:
        """Return the tree with "_" for "-" in keys, at every depth but below VERBATIM names."""
        result: Tree = {}
        for spelled, value in tree.items():
            name = str(spelled).replace("-", "_")
            if name in result:
                rule = f"is given twice, as {spelled} too"
                self.problems.append(Problem(f"{prefix}{name}", rule, remedy="keep one"))
            deeper = isinstance(value, dict) and name not in VERBATIM
            result[name] = self._underscore(value, f"{prefix}{name}.") if deeper else value
        return result

    def move(self, path: str, value: Any, target: str) -> None:
        """Set the key `target` to the value written at `path`; another value there is a problem."""
        home, _, key = target.rpartition(".")
        kind, _, model = home.partition(".")
        section = self.sections[kind][model] if model else self.sections[kind]
        present = section.setdefault(key, value)
        if present is not value and present != value:  # `is` for NaN, which differs from itself
            rule = f"and {ref(target)}={format_value(present)} say the same thing differently"
            self.problems.append(Problem(path, rule, remedy="keep one"))
        self.renamed.setdefault(target, path)

    def _move_section(self, path: str, role: str, values: Any) -> None:
        for key, value in self.as_section(path, values).items():
            self.move(f"{path}.{key}", value, f"{role}.{key}")
