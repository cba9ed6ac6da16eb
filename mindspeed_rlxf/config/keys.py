"""The keys of each section of the YAML, taken from the schema, and a configuration in these keys.

Loading the YAML of `to_yaml` gives the same configuration, so the file in a run directory starts
the same run.
"""

import functools
from collections.abc import Collection, Sequence
from typing import Any

import yaml
from pydantic.fields import FieldInfo

from mindspeed_rlxf.config.enums import CONFIGURED, RewardKind, Role
from mindspeed_rlxf.config.problems import Problem, closest
from mindspeed_rlxf.config.schema import (
    ActorConfig,
    ArchitectureConfig,
    CriticConfig,
    FunctionConfig,
    PoolSettings,
    RefConfig,
    RewardConfig,
    RoleConfig,
    RunConfig,
)

REMOVED: dict[str, str] = {
    "logging.samples_file_mb": "remove it: sample files are not compressed",
    "plan.calibration": "remove it: a plan predicts no times",
    "plan.device": "remove it: a plan predicts no times",
    "plan.prompt_tokens": "remove it: a plan predicts no times",
    "plan.response_tokens": "remove it: a plan predicts no times",
    "reward.sandbox.level": "remove it: programs run in bubblewrap",
    "reward.sandbox.weak": "use reward.sandbox.unsafe=true, which runs programs without isolation",
    "runtime.allow_unauthenticated": "remove it: any cluster that you name is joined",
    "training.file_mode": "remove it: files have the modes that the umask gives them",
    "training.no_shared_storage": "remove it: all nodes must share training.output_dir",
}
"""Keys that earlier versions had -> what to do now, a clause."""

Fields = dict[str, FieldInfo]
ROLE_SECTIONS: dict[Role, type[RoleConfig]] = {
    Role.ACTOR_ROLLOUT: ActorConfig,
    Role.REF: RefConfig,
    Role.CRITIC: CriticConfig,
    Role.REWARD: RewardConfig,
}
NESTED_ROLES = "actor_rollout_ref"
"""The older toolkit nests `actor_rollout` and `ref` under this key."""


def fields_of(section: Any) -> Fields:
    """Return the keys of a section as the YAML has them; {} for what is no section.

    A role may have keys of its model's architecture, which are laid over the model's.
    """
    found: Fields = {}
    for name, field in getattr(section, "model_fields", {}).items():
        found |= ArchitectureConfig.model_fields if name == "architecture" else {name: field}
    return found


PLAIN_SECTIONS: dict[str, Any] = {
    name: field.annotation
    for name, field in RunConfig.model_fields.items()
    if fields_of(field.annotation)
    and name not in ("training", "pool_settings", *(role.value for role in CONFIGURED))
}
"""Sections whose YAML keys are exactly their fields."""

TOP_LEVEL = {
    "model", "training", "resource_pool", "placement", "dry_run", NESTED_ROLES,
    *PLAIN_SECTIONS, *(role.value for role in CONFIGURED),
}  # fmt: skip

RULE_KEYS = (
    "kind", "rules", "verifier", "sandbox", "function", "functions", "allow_changed_function",
    "processes", "timeout_s", "worker_memory_gib", "failed_score", "max_failed",
)  # fmt: skip
"""Keys of the section reward that are read with `kind: rule`."""
WITHOUT_MODEL = {
    RewardKind.RULE.value: RULE_KEYS,
    RewardKind.HUGGING_FACE.value: (*RULE_KEYS, "load", "model_weight", "micro_batch_size", "bf16"),
}
"""Kind of reward without a Megatron model -> keys of the section reward that it reads."""

SHARED: Fields = {
    name: field
    for role in reversed(CONFIGURED)
    for name, field in fields_of(ROLE_SECTIONS[role]).items()
    if name not in (*RULE_KEYS, "model_weight", "save")
}
"""Role keys that `training` and `model.<name>` may hold as defaults for every role."""


@functools.cache
def keys_of(section: str) -> Fields:
    """Return the keys that a section of the YAML may have; {} where users choose the names.

    section: path, as `training`, `model.NAME` or `algorithm.kl_ctrl`
    """
    first, *rest = section.split(".")
    if first == "model":
        return {name: field for name, field in SHARED.items() if name != "model"}
    if first == "resource_pool":
        return PoolSettings.model_fields
    sections = {role.value: model for role, model in ROLE_SECTIONS.items()}
    field = RunConfig.model_fields.get(first)
    found = fields_of(sections.get(first) or (field and field.annotation))
    found |= SHARED if section == "training" else {}
    for name in rest:
        found = fields_of(found[name].annotation) if name in found else {}
    return found


def known_keys() -> dict[str, set[str]]:
    """Map each section of the YAML to the keys it may have; sections within others are dotted.

    Without `model` and `resource_pool`, whose keys are names of the user's choice, and `offload`.
    """
    roles = [role.value for role in CONFIGURED]
    names = (*PLAIN_SECTIONS, "algorithm.kl_ctrl", "reward.sandbox", *roles, "training")
    known = {name: {*keys_of(name)} for name in names}
    return known | {"placement": {*roles}, "reward.function": {*FunctionConfig.model_fields}}


def unknown_key(section: str, name: str, known: Collection[str], path: str = "") -> Problem:
    """Return the problem of a key `name` that `section` (`""` = top level) does not have.

    The remedy is that of REMOVED; else it names the most similar key of the section, else the
    first section of `known_keys` with a key `name`, else `remove it`.
    known: keys of the section
    path:  how the YAML spells the key where that differs from `section.name`
    """
    full = f"{section}.{name}".removeprefix(".")
    path = path or full
    if gone := REMOVED.get(full):
        return Problem(path, "was removed", remedy=gone, colon=True)
    homes = [f"{other}.{name}" for other, names in known_keys().items() if name in names]
    if guess := closest(name, known):
        homes = [f"{path.removesuffix(name)}{guess}"]
    remedy = f"did you mean {homes[0]}?" if homes else "remove it"
    return Problem(path, "unknown key", remedy=remedy, colon=True)


def find_field(path: Sequence[str]) -> FieldInfo | None:
    """Return the schema's field for a key of the YAML; None for an unknown key.

    An entry of a table, as `reward.rules.SOURCE` or a pool, has the field of the table.
    """
    field, place = RunConfig.model_fields.get(path[0]), path[0]
    for name in path[1:]:
        keys = keys_of(place)
        if place == "resource_pool" and name not in keys:
            break
        if keys:
            field = keys.get(name)
        place += f".{name}"
    return field


def to_tree(config: RunConfig) -> dict[str, Any]:
    """Return the complete configuration, defaults included, as plain values under the YAML's keys.

    Architectures are under `model.<name>`, optimizer keys directly in their role's section. The
    name of the config is left out, and `critic` where there is none. Secrets are shown
    by their placeholders.
    """
    values = config.model_dump(mode="json", exclude={"name"})
    models: dict[str, dict[str, Any]] = {}
    for role in CONFIGURED:  # also those that do not run, as a reference without a KL term
        if (section := values[role.value]) is None:
            del values[role.value]
            continue
        architecture = section.pop("architecture")
        if architecture is None:
            kept = WITHOUT_MODEL[config.reward.kind.value]
            values[role.value] = {key: section[key] for key in kept}
            continue
        shared = models.setdefault(section["model"], architecture)
        own = {key: value for key, value in architecture.items() if shared[key] != value}
        values[role.value] = {**section, **own}
    values["resource_pool"] |= values.pop("pool_settings")
    return {"model": models, **values}


def to_yaml(config: RunConfig) -> str:
    """Return the dict of `to_tree` as YAML text, in its order of keys."""
    return str(yaml.safe_dump(to_tree(config), sort_keys=False, allow_unicode=True, width=100))
