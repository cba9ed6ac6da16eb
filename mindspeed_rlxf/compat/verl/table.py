"""The table of verl's keys, `keys.yaml`: what each becomes, its default and its older names."""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from mindspeed_rlxf.config.keys import Tree

TABLE: Tree = yaml.safe_load(Path(__file__).with_name("keys.yaml").read_text("utf-8"))
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
TRAINED: dict[str, str] = TABLE["groups"]["trained"]
"""verl's section of a trained role -> ours."""
LEGACY = ("auto", "enable")
"""Values of verl's key use_legacy_worker_impl, 0.6 and 0.7, with the FSDP workers of 0.5."""
MODELS = {ACTOR: "actor_rollout_ref.model", "critic": "critic.model"}
"""verl's section of a trained role -> that of its model."""


def _complete(entry: Tree | str, section: str, role: str) -> Tree:
    """Return an entry of the table with the full names of all keys."""
    found: Tree = {"to": entry} if isinstance(entry, str) else dict(entry)
    found["to"] = f"{role}.{found['to']}".lstrip(".")
    if "also" in found:
        found["also"] = _complete(found["also"], section, role)

    def name(key: str) -> str:
        return section + key if key.startswith(".") else key

    for condition in {"if", "unless"} & found.keys():
        found[condition] = {name(k): v for k, v in found[condition].items()}
    if "times" in found:
        found["times"] = [name(key) for key in found["times"]]
    if "equal" in found:
        found["equal"] = name(found["equal"])
    return found


RENAMED: dict[str, Tree] = {
    f"{section}.{key}".lstrip("."): _complete(entry, section, role)
    for group, sections in TABLE["groups"].items()
    for section, role in sections.items()
    for key, entry in TABLE[group].items()
}
NO_EFFECT = {pattern: text for text, keys in TABLE["no_effect"].items() for pattern in keys.split()}
EXACT_KEYS = [key for key in (*RENAMED, *TABLE["older"], *NO_EFFECT) if "*" not in key]
REFUSED = [key for entry in TABLE["refused"] for key in entry["keys"].split()]
SECTIONS = {key.partition(".")[0] for key in (*EXACT_KEYS, *NO_EFFECT, *REFUSED)} - {"*"}
"""verl's sections. A file may also have sections of ours with other names."""


def current_name(key: str) -> str:
    """Return the name in the table of a key, which may be an older one."""
    older = [name for name in TABLE["older"] if f"{key}.".startswith(f"{name}.")]
    name = max(older, key=len, default="")
    return TABLE["older"][name] + key.removeprefix(name) if name else key


def flatten(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values; a section with names of users' choice is one value."""
    for name, value in tree.items():
        key = f"{path}{name}"
        if isinstance(value, Mapping) and not RENAMED.get(current_name(key), {}).get("any"):
            yield from flatten(value, f"{key}.")
        elif value != "???" and name != "_target_":  # absent; a class
            yield key, value


DEFAULTS = dict(flatten(TABLE["defaults"]))
KINDS: dict[type, tuple[Any, ...]] = {
    bool: ("true or false", bool, type(None)), int: ("a number", int),
    float: ("a number", int, float, type(None)), list: ("a list", list),
}  # fmt: skip
"""Kind of a default -> its name, and the kinds that a value may have."""


def is_known(key: str) -> bool:
    """Return whether verl has a key, also one without effect or one that is refused."""
    patterns = [*RENAMED, *DEFAULTS, *TABLE["older"], *NO_EFFECT, *REFUSED]
    return any(fnmatchcase(key, pattern) for pattern in patterns)
