"""Take values of the older toolkit's keys out of a YAML, and set the keys that replace them."""

from __future__ import annotations

from typing import Any

from mindspeed_rlxf.config.draft import Draft, Tree
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.errors import Problem, ref
from mindspeed_rlxf.config.suggest import format_value

ACTOR = Role.ACTOR_ROLLOUT.value


def reject_non_flag(draft: Draft, path: str, value: Any) -> None:
    draft.reject(Problem(path, "must be true or false", format_value(value), "use true"))


def take_value(draft: Draft, sections: Tree, key: str) -> tuple[str, Any] | None:
    """Remove a key from the sections that apply to the actor; return its path and value, or None.

    Of several values that of the actor's section counts, then training's, then its model's; the
    others are removed too. The path is as the YAML spells it.
    """
    training, actor = sections["training"], sections[ACTOR]
    model = str(actor.get("model", training.get("model")))
    of_model = sections["model"].get(model, {})
    found = None
    for name, values in ((f"model.{model}", of_model), ("training", training), (ACTOR, actor)):
        if key in values:
            path = f"{name}.{key}"
            found = draft.spelled.get(path, path), values.pop(key)
    return found


def take_flag(draft: Draft, sections: Tree, key: str) -> tuple[str, bool] | None:
    """Remove a key and return its path and value, as `take_value` does; None if it is absent.

    A value that is not true or false is a problem, added to `draft`; it then returns None too.
    """
    found = take_value(draft, sections, key)
    if found and not isinstance(found[1], bool):
        reject_non_flag(draft, *found)
        return None
    return found


def set_moved_key(draft: Draft, sections: Tree, path: str, value: Any, target: str) -> None:
    """Set `target`, a `section.key`, to `value`, which was at `path`; record `path` as its origin.

    If `target` has a value (null too), that stays: the same one is fine, another adds a problem to
    `draft`.
    """
    section, key = target.split(".")
    present = sections[section].setdefault(key, value)
    if present == value:
        draft.origins.setdefault((section, key), path)
        return
    reject_two_values(draft, path, target, present)


def reject_two_values(draft: Draft, path: str, target: str, present: Any) -> None:
    rule = f"and {ref(target)}={format_value(present)} say the same thing differently"
    draft.reject(Problem(path, rule, remedy="keep one"))
