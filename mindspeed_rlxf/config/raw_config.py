"""The YAML as the user wrote it: its values under our keys, and how messages spell these keys."""

from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_rlxf.config.keys import NESTED_ROLES, ROLES, TOP_LEVEL, Tree, unknown_key
from mindspeed_rlxf.config.problems import Problem, format_value, ref

VERBATIM = ("model", "resource_pool", "rules", "arguments", "chat_template_kwargs", "extra_args")
"""Sections with user-chosen names as keys."""
OLDER_ACTOR = "actor"
NESTED = {"actor_rollout": "actor_rollout", OLDER_ACTOR: "actor_rollout", "ref": "ref"}
"""Section below `actor_rollout_ref` -> role."""


def set_default(section: Tree, **defaults: Any) -> None:
    """Set those keys in `section` in place, if absent or None."""
    section |= {key: value for key, value in defaults.items() if section.get(key) is None}


def _underscore(tree: Mapping[Any, Any]) -> Tree:
    underscored: Tree = {}
    for spelled, value in tree.items():
        name = str(spelled).replace("-", "_")
        is_section = isinstance(value, dict) and name not in VERBATIM
        underscored[name] = _underscore(value) if is_section else value
    return underscored


def _has_key(section: Tree, keys: Sequence[str]) -> bool:
    """Whether a section has `keys[0]`; and `keys[1]` in it, if that is a section, as `offload`."""
    if keys[0] not in section:
        return False
    value = section[keys[0]]
    return len(keys) == 1 or value is None or keys[1] in value


class RawConfig:
    """The YAML as the user wrote it, with underscores in keys; and the problems found so far.

    From the YAML `actor_rollout_ref: {actor_rollout: {clip-ratio: 0.1}}`:

        raw.sections["actor_rollout"]            {"clip_ratio": 0.1}
        raw.user_key("actor_rollout.clip_ratio") "actor_rollout_ref.actor_rollout.clip_ratio"

    Attributes:
        sections: Section -> its keys; `dry_run` -> its value.
        renamed: Our key, `section.key` -> the user's, if it is spelled or placed differently.
        problems: Mistakes found.
        notes: Text -> the `key=value` items it is about; one line each.
        nested: Whether the YAML has the older nesting `actor_rollout_ref`.
    """

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self.problems: list[Problem] = []
        self.renamed: dict[str, str] = {}
        self.notes: dict[str, dict[str, None]] = {}
        sections = _underscore(tree)
        self.nested = NESTED_ROLES in sections
        if isinstance(sections.get("runtime"), str):
            sections["runtime"] = {"kind": sections["runtime"]}
        older_actor = sections.pop(OLDER_ACTOR, None)
        for name in sorted(sections.keys() - TOP_LEVEL):
            self.problems.append(unknown_key("", name, TOP_LEVEL))
        self.sections: Tree = {"dry_run": sections.get("dry_run", False)}
        for name in TOP_LEVEL - {"dry_run"}:
            self.sections[name] = self.as_section(name, sections.get(name))
        self._move_section(OLDER_ACTOR, "actor_rollout", older_actor)
        for role, values in self.sections.pop(NESTED_ROLES).items():
            if role in NESTED:
                self._move_section(f"{NESTED_ROLES}.{role}", NESTED[role], values)
            else:
                self.problems.append(unknown_key(NESTED_ROLES, role, {*NESTED.values()}))
        self.sections["model"] = {
            str(name): _underscore(self.as_section(f"model.{name}", keys))
            for name, keys in self.sections["model"].items()
        }

    def note(self, meaning: str, key: str) -> None:
        """Add `key` (or `key=value`) to the note `meaning`."""
        self.notes.setdefault(meaning, {})[key] = None

    def list_notes(self) -> list[str]:
        """Return the notes, a line for each meaning."""
        return [f"{', '.join(keys)}: {meaning}" for meaning, keys in self.notes.items()]

    def as_section(self, path: str, value: Any) -> Tree:
        """Return a dict's copy, or {} for None and, with a problem, for other values."""
        if value is None or isinstance(value, dict):
            return {**(value or {})}
        self.refuse(path, "must be a section of keys", value, "write `key: value` lines under it")
        return {}

    def refuse(self, path: str, rule: str, value: Any, remedy: str) -> None:
        """Report a wrong value."""
        self.problems.append(Problem(path, rule, format_value(value), remedy))

    def model_of(self, role: str) -> Any:
        """Return a role's `model`, its own or `training`'s.

        `auto` if neither names one and the YAML has no section `model`.
        """
        default = None if self.sections["model"] else "auto"
        default = self.sections["training"].get("model", default)
        return self.sections[role].get("model", default)

    def value(self, role: str, key: str) -> Any:
        """Return a role's value: its own, else `training`'s, else its model's, else None."""
        for section in self.sections_of_role(role).values():
            if key in section:
                return section[key]
        return None

    def user_key(self, path: str) -> str:
        """Return the key in the user's YAML that gives the value of our `section.key`.

        Of a role it is the role's own key if the YAML has it, else `training.KEY` or
        `model.NAME.KEY`: `actor_rollout.lr` may stand there as `training.lr`.
        """
        section, *keys = path.split(".")
        if section == "pool_settings":
            section = "resource_pool"
        is_of_model = keys[:1] == ["architecture"]
        if is_of_model:
            del keys[0]
        if section in ROLES and keys:
            section = self._section_with(section, keys, is_of_model)
        names = [*section.split("."), *keys]
        # The longest beginning of the path that the YAML spells differently.
        for end in range(len(names), 1, -1):
            spelled = self.renamed.get(".".join(names[:end]))
            if spelled is not None:
                return ".".join((spelled, *names[end:]))
        return ".".join(names)

    def _section_with(self, role: str, keys: Sequence[str], is_of_model: bool) -> str:
        """Return the section with a role's key; without one, that of the model or the role."""
        sections = self.sections_of_role(role)
        for name, values in sections.items():
            if _has_key(values, keys):
                return name
        return [*sections][-1] if is_of_model else role

    def sections_of_role(self, role: str) -> dict[str, Tree]:
        """Return the sections that may have a role's keys, by name, in order of precedence."""
        model = str(self.model_of(role))
        return {
            role: self.sections[role],
            "training": self.sections["training"],
            f"model.{model}": self.sections["model"].get(model, {}),
        }

    def move(self, path: str, value: Any, target: str) -> None:
        """Set our key `target` to the value of the user's key `path`.

        Another value there is a problem.
        """
        section_name, _, key = target.rpartition(".")
        top_level, _, model = section_name.partition(".")
        section = self.sections[top_level]
        if model:
            section = section[model]
        present = section.setdefault(key, value)
        if present is not value and present != value:  # `is` for NaN, which differs from itself
            rule = f"and {ref(target)}={format_value(present)} say the same thing differently"
            self.problems.append(Problem(path, rule, remedy="keep one"))
        self.renamed.setdefault(target, path)

    def _move_section(self, path: str, role: str, values: Any) -> None:
        for key, value in self.as_section(path, values).items():
            self.move(f"{path}.{key}", value, f"{role}.{key}")
