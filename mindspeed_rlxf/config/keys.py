"""The keys of each section of the YAML, taken from the schema."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mindspeed_rlxf.config.enums import CONFIGURED, Role
from mindspeed_rlxf.config.errors import Problem
from mindspeed_rlxf.config.removed_keys import REMOVED
from mindspeed_rlxf.config.schema import (
    ActorConfig,
    AlgorithmConfig,
    ArchitectureConfig,
    CriticConfig,
    DataConfig,
    DeviceConfig,
    FunctionConfig,
    KlControlConfig,
    LoggingConfig,
    OptimizerConfig,
    PlanConfig,
    PoolSettings,
    RefConfig,
    RewardConfig,
    RoleConfig,
    RolloutConfig,
    RunConfig,
    RuntimeConfig,
    SandboxConfig,
    TrainingConfig,
    ValidationConfig,
)
from mindspeed_rlxf.config.suggest import closest

PLAIN_SECTIONS: dict[str, type[BaseModel]] = {
    "algorithm": AlgorithmConfig,
    "rollout": RolloutConfig,
    "data": DataConfig,
    "validation": ValidationConfig,
    "logging": LoggingConfig,
    "device": DeviceConfig,
    "runtime": RuntimeConfig,
    "plan": PlanConfig,
}
"""Sections whose YAML keys are exactly their fields."""

ROLE_SECTIONS: dict[Role, type[RoleConfig]] = {
    Role.ACTOR_ROLLOUT: ActorConfig,
    Role.REF: RefConfig,
    Role.CRITIC: CriticConfig,
    Role.REWARD: RewardConfig,
}

NESTED_ROLES = "actor_rollout_ref"
"""The older toolkit nests `actor_rollout` and `ref` under this key."""


def fields(section: Any) -> set[str]:
    """Return the names of a section's fields; an empty set for other types."""
    return set(getattr(section, "model_fields", ()))


ARCHITECTURE_KEYS = fields(ArchitectureConfig)
OPTIMIZER_KEYS = fields(OptimizerConfig)


def role_keys(role: Role) -> set[str]:
    """Return the keys that the YAML section of a role may have.

    With those of its architecture and, if it is trained, of its optimizer, which are in no
    subsection there.
    """
    own = fields(ROLE_SECTIONS[role])
    optimizer = OPTIMIZER_KEYS if "optimizer" in own else set()
    return (own - {"architecture", "optimizer"}) | ARCHITECTURE_KEYS | optimizer


RULE_KEYS = (
    "kind", "rules", "verifier", "sandbox", "function", "functions", "allow_changed_function",
    "processes", "timeout_s", "worker_memory_gib", "failed_score", "max_failed",
)  # fmt: skip
"""Keys of the section reward that are read with `kind: rule`."""
CLASSIFIER_KEYS = (*RULE_KEYS, "load", "model_weight", "micro_batch_size", "bf16")
"""Keys of the section reward that are read with `kind: huggingface`."""

SHARED_KEYS = set().union(*map(role_keys, CONFIGURED)) - {*RULE_KEYS, "model_weight", "save"}
"""Role keys that `training` and `model.<name>` may hold as defaults for every role."""


def known_keys() -> dict[str, set[str]]:
    """Map each section of the YAML to the keys it may have; sections within others are dotted.

    With `placement` (its keys are roles). Without `model` and `resource_pool`, whose keys are names
    of the user's choice, and without `offload`.
    """
    known = {name: fields(section) for name, section in PLAIN_SECTIONS.items()}
    known["algorithm.kl_ctrl"] = fields(KlControlConfig)
    known["reward.sandbox"] = fields(SandboxConfig)
    known["placement"] = {role.value for role in CONFIGURED}
    known |= {role.value: role_keys(role) for role in CONFIGURED}
    known["reward.function"] = fields(FunctionConfig)
    return known | {"training": fields(TrainingConfig) | SHARED_KEYS}


TOP_LEVEL = {
    "model", "training", "resource_pool", "placement", "dry_run", NESTED_ROLES,
    *PLAIN_SECTIONS, *(role.value for role in CONFIGURED),
}  # fmt: skip


def unknown_key(section: str, name: str, known: set[str], path: str = "") -> Problem:
    """Return the problem of a key `name` that `section` (`""` = top level) does not have.

    The remedy is that of REMOVED; else it names the most similar key of the section, else the
    first section of `known_keys` with a key `name`, else `remove it`.
    known: keys of the section
    path:  how the YAML spells the key where that differs from `section.name`
    """
    prefix = f"{section}." if section else ""
    if gone := REMOVED.get(f"{prefix}{name}"):
        return Problem(path or f"{prefix}{name}", "was removed", remedy=gone, colon=True)
    homes = [f"{other}.{name}" for other, names in known_keys().items() if name in names]
    if guess := closest(name, known):
        homes = [f"{path.removesuffix(name)}{guess}" if path else f"{prefix}{guess}"]
    remedy = f"did you mean {homes[0]}?" if homes else "remove it"
    return Problem(path or f"{prefix}{name}", "unknown key", remedy=remedy, colon=True)


def find_field(path: tuple[str, ...]) -> FieldInfo | None:
    """Return the schema's field for a key of the YAML; None for an unknown key.

    Handles `model.<name>.<key>`, settings in `resource_pool`, and in a role's section the keys of
    its optimizer and architecture.
    """
    section, *rest = path
    if section == "model":
        return ArchitectureConfig.model_fields.get(rest[1]) if len(rest) == 2 else None
    if section == "resource_pool" and rest and rest[0] in PoolSettings.model_fields:
        return PoolSettings.model_fields[rest[0]]
    roles = {role.value: known for role, known in ROLE_SECTIONS.items()}
    if section in roles and rest:
        for model in (roles[section], OptimizerConfig, ArchitectureConfig):
            if rest[0] in model.model_fields:
                return _find_nested(model, tuple(rest))
        return None
    return _find_nested(RunConfig, path)


def _find_nested(model: type[BaseModel], path: tuple[str, ...]) -> FieldInfo | None:
    field = model.model_fields.get(path[0])
    if field is None or len(path) == 1:
        return field
    inner = field.annotation
    if isinstance(inner, type) and issubclass(inner, BaseModel):
        return _find_nested(inner, path[1:])
    return field  # a table, whose entries have the table's rule
