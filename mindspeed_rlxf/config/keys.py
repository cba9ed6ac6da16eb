"""The YAML's keys: what the schema allows, what the user wrote, and a configuration in these keys.

Loading `to_yaml`'s output gives the same configuration, so a run directory's config.yaml starts the
same run.
"""

import functools
from collections.abc import Collection, Sequence
from typing import Any, TypeAlias, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from mindspeed_rlxf.config.enums import CONFIGURED, RewardKind, Role, Stage
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
    "training.allow_shrink": "remove it: start the same command with a smaller resource_pool",
    "training.file_mode": "remove it: files have the modes that the umask gives them",
    "training.no_shared_storage": "remove it: all nodes must share training.output_dir",
}
"""Keys in earlier versions -> what to do now, as a clause."""

NAMES_ELSEWHERE = {
    "batch_size": "global_batch_size",
    "beta": "kl_coef",
    "entropy_coef": "entropy_coeff",
    "epsilon": "clip_ratio",
    "eval_steps": "interval",
    "gradient_clipping": "clip_grad",
    "grad_clip": "clip_grad",
    "learning_rate": "lr",
    "lr_scheduler_type": "lr_decay_style",
    "lr_warmup_steps_ratio": "lr_warmup_fraction",
    "max_completion_length": "max_new_tokens",
    "max_grad_norm": "clip_grad",
    "max_response_length": "max_new_tokens",
    "max_steps": "train_iters",
    "model_name_or_path": "load",
    "num_generations": "n_samples_per_prompt",
    "num_iterations": "ppo_epochs",
    "per_device_train_batch_size": "micro_batch_size",
    "ppo_micro_batch_size_per_gpu": "micro_batch_size",
    "reward_funcs": "functions",
    "rollout_n": "n_samples_per_prompt",
    "save_freq": "save_interval",
    "save_steps": "save_interval",
    "test_freq": "interval",
    "total_training_steps": "train_iters",
    "train_batch_size": "global_batch_size",
    "warmup_ratio": "lr_warmup_fraction",
}
"""Names of TRL and verl -> ours; the section may be another one."""

Fields: TypeAlias = dict[str, FieldInfo]
Tree: TypeAlias = dict[str, Any]
ROLES = tuple(role.value for role in CONFIGURED)
ROLE_SECTIONS: dict[Role, type[RoleConfig]] = {
    Role.ACTOR_ROLLOUT: ActorConfig,
    Role.REF: RefConfig,
    Role.CRITIC: CriticConfig,
    Role.REWARD: RewardConfig,
}
NESTED_ROLES = "actor_rollout_ref"
"""The older toolkit nests `actor_rollout` and `ref` under this key."""


def fields_of(section: Any) -> Fields:
    """Return a section's YAML keys, {} if it is no section.

    A role may override architecture keys from its model.
    """
    fields: Fields = {}
    for name, field in getattr(section, "model_fields", {}).items():
        fields |= ArchitectureConfig.model_fields if name == "architecture" else {name: field}
    return fields


PLAIN_SECTIONS: dict[str, Any] = {
    name: field.annotation
    for name, field in RunConfig.model_fields.items()
    if fields_of(field.annotation) and name not in ("training", "pool_settings", *ROLES)
}
"""Sections whose YAML keys are exactly their fields."""

TOP_LEVEL = {
    "model", "training", "resource_pool", "placement", "dry_run", NESTED_ROLES,
    *PLAIN_SECTIONS, *ROLES,
}  # fmt: skip

RULE_KEYS = (
    "kind", "rules", "verifier", "sandbox", "function", "functions", "allow_changed_function",
    "processes", "timeout_s", "worker_memory_gib", "failed_score", "max_failed", "agent_text",
)  # fmt: skip
"""Keys in the section `reward` read with `kind: rule`."""
WITHOUT_MODEL = {
    RewardKind.RULE.value: RULE_KEYS,
    **dict.fromkeys(
        (RewardKind.HUGGING_FACE.value, RewardKind.ROLE.value),
        (*RULE_KEYS, "load", "model_weight", "micro_batch_size", "bf16"),
    ),
}
"""Reward kind without a Megatron model -> the keys it reads in the section `reward`."""

WITHOUT_CRITIC = (Stage.RAY_GRPO.value, Stage.RAY_ONLINE_DPO.value)
"""Stages that train no critic."""

SHARED: Fields = {}
"""Role keys that `training` and `model.<name>` may hold as defaults for every role."""
for _role in reversed(CONFIGURED):  # so that the field is the first role's with the key
    for _name, _field in fields_of(ROLE_SECTIONS[_role]).items():
        if _name not in (*RULE_KEYS, "model_weight", "save"):
            SHARED[_name] = _field


@functools.cache
def keys_of(section: str) -> Fields:
    """Return the keys allowed in a YAML section; {} if users choose the names.

    Args:
        section: Dotted path: `training`, `model.NAME`, `algorithm.kl_ctrl` or
            `reward.functions.0`.
    """
    top_level, *nested = section.split(".")
    if top_level == "model":
        return {name: field for name, field in SHARED.items() if name != "model"}
    if top_level == "resource_pool":
        return PoolSettings.model_fields
    role_sections = {role.value: role_section for role, role_section in ROLE_SECTIONS.items()}
    field = RunConfig.model_fields.get(top_level)
    fields = fields_of(role_sections.get(top_level) or (field and field.annotation))
    if section == "training":
        fields |= SHARED
    for name in nested:
        if not name.isdigit():  # the number of an entry has the keys of its list
            fields = fields_of(_entry_of(fields[name].annotation)) if name in fields else {}
    return fields


def _entry_of(annotation: Any) -> Any:
    """Return the type of a list's entries; another type as it is."""
    if get_origin(annotation) is tuple:
        return get_args(annotation)[0]
    return annotation


def known_keys() -> dict[str, set[str]]:
    """Map each YAML section, with a dotted name if nested, to its allowed keys.

    Leaves out `offload`, and `model` and `resource_pool`, whose keys are user-chosen names.
    """
    nested = ("algorithm.kl_ctrl", "reward.sandbox", "rollout.vllm")
    keys = {name: {*keys_of(name)} for name in (*PLAIN_SECTIONS, *nested, *ROLES, "training")}
    keys["placement"] = {*ROLES}
    keys["reward.function"] = {*FunctionConfig.model_fields}
    return keys


def unknown_key(section: str, name: str, known: Collection[str], path: str = "") -> Problem:
    """Return the problem for an unknown key `name` in `section`.

    The hint comes from REMOVED; else it names the section's most similar key, else another section
    with this key.

    Args:
        section: Dotted path; "" is the top level.
        name: The unknown key.
        known: The section's keys.
        path: The key as the YAML spells it, if not `section.name`.
    """
    full = f"{section}.{name}".removeprefix(".")
    path = path or full
    if full in REMOVED:
        return Problem(path, "was removed", remedy=REMOVED[full], colon=True)
    remedy = "remove it"
    ours = NAMES_ELSEWHERE.get(name, name)
    guess = ours if ours in known else closest(name, known)
    if guess is not None:
        remedy = f"did you mean {path.removesuffix(name)}{guess}?"
    else:
        sections = [section for section, keys in known_keys().items() if ours in keys]
        if sections:
            remedy = f"did you mean {sections[0]}.{ours}?"
    return Problem(path, "unknown key", remedy=remedy, colon=True)


def find_field(path: Sequence[str]) -> FieldInfo | None:
    """Return the schema's field for a dotted YAML key, None if unknown.

    A table entry, such as `reward.rules.SOURCE` or a pool, has the table's field.
    """
    section = path[0]
    field = RunConfig.model_fields.get(section)
    for name in path[1:]:
        if name.isdigit():
            continue
        keys = keys_of(section)
        if keys and (section != "resource_pool" or name in keys):
            field = keys.get(name)
        section += f".{name}"
    return field


def to_tree(config: RunConfig) -> dict[str, Any]:
    """Return the complete configuration, defaults included, as plain values under YAML keys.

    Architectures are under `model.<name>`, optimizer keys directly in their role's section. Leaves
    out the config name and an absent `critic`, and shows placeholders for secrets.
    """
    values = config.model_dump(mode="json", exclude={"name"})
    models: dict[str, dict[str, Any]] = {}
    for role in CONFIGURED:  # also those that do not run, as a reference without a KL term
        section = values[role.value]
        if section is None:
            del values[role.value]
            continue
        architecture = section.pop("architecture")
        if architecture is None:
            read_keys = WITHOUT_MODEL[config.reward.kind.value]
            values[role.value] = {key: section[key] for key in read_keys}
            continue
        # Roles may override keys of the model that they share.
        shared = models.setdefault(section["model"], architecture)
        overrides = {key: value for key, value in architecture.items() if shared[key] != value}
        values[role.value] = {**section, **overrides}
    values["resource_pool"] |= values.pop("pool_settings")
    return {"model": models, **values}


def to_yaml(config: RunConfig) -> str:
    """Return `to_tree`'s dict as YAML text, keeping its key order."""
    return str(yaml.safe_dump(to_tree(config), sort_keys=False, allow_unicode=True, width=100))
