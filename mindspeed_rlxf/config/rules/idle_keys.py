"""Find keys without effect, because another key switches their feature off.

`REFUSED` contradict the stage or the method: they are errors. The others are keys that people leave
in a YAML while they switch something on and off: they are legal, and listed in a note. A key that
has its default value is never reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from pydantic import BaseModel

from mindspeed_rlxf.config.enums import (
    CONFIGURED,
    KlControl,
    LrDecayStyle,
    NanPolicy,
    Recompute,
    RewardKind,
    Role,
    RopeScaling,
    RuntimeKind,
    ScorePosition,
    Stage,
)
from mindspeed_rlxf.config.errors import Problem, ref
from mindspeed_rlxf.config.rules.host import joined_address
from mindspeed_rlxf.config.sandbox import RULES_OF_PROGRAMS, SandboxConfig
from mindspeed_rlxf.config.schema import LearningConfig, RunConfig
from mindspeed_rlxf.config.suggest import format_value

YAML_NAMES = {"pool_settings": "resource_pool"}
FROM_FOLDER = "model.auto."
"""Origin of keys that come from a config.json, not from the user."""


@dataclass(frozen=True)
class Idle:
    """Keys of one section that have no effect under a condition.

    section:   dotted attribute of RunConfig
    reason:    completes "has no effect ..."; a format string over `config`
    condition: True where the keys have no effect
    """

    section: str
    keys: tuple[str, ...]
    reason: str
    condition: Callable[[RunConfig], bool]


@dataclass(frozen=True)
class RoleIdle:
    """As `Idle`, for keys of several roles, their architectures and their optimizers.

    reason: a format string over `config` and the role's `section`
    """

    roles: tuple[Role, ...]
    keys: tuple[str, ...]
    reason: str
    condition: Callable[[RunConfig, Role], bool]


def _prefers_pairs(config: RunConfig) -> bool:
    return config.training.stage is Stage.RAY_ONLINE_DPO


def _is_local(config: RunConfig) -> bool:
    return config.runtime.kind is RuntimeKind.LOCAL


def _joins_no_cluster(config: RunConfig) -> bool:
    return _is_local(config) or joined_address(config) is None


def _has_validation_prompts(config: RunConfig) -> bool:
    return bool(config.data.val_files or config.data.val_data_path)


def _never_validates(config: RunConfig) -> bool:
    keys = config.validation
    return _has_validation_prompts(config) and not (keys.interval or keys.before or keys.after)


def _saves_only_at_the_end(config: RunConfig) -> bool:
    keys = config.training
    return not (0 < keys.save_interval < keys.train_iters or keys.seconds_between_saves)


def _returns_total_scores(config: RunConfig) -> bool:
    """No discounting; or a greedy baseline, whose plain score fits no rescaled return."""
    traits = config.algorithm.estimator
    return not _prefers_pairs(config) and (traits.reads_greedy or not traits.discounts)


def _generates_nothing(config: RunConfig) -> bool:
    """Every response is fixed, also those of validation and of a greedy baseline."""
    fixed = config.actor_rollout.fixed_responses is not None
    return fixed and not (
        config.algorithm.estimator.reads_greedy or _has_validation_prompts(config)
    )


def _learner(config: RunConfig, role: Role) -> LearningConfig:
    return config.value_model if role is Role.CRITIC else config.actor_rollout


WITH_STAGE = f"with {ref('training.stage')}={{config.training.stage.value}}"
WITH_ESTIMATOR = f"with {ref('algorithm.adv_estimator')}={{config.algorithm.adv_estimator}}"
OF_TOKEN_REWARDS = ("gamma", "whiten_rewards")
OF_PLACES = ("score_position", "score_slot_limit")  # no place in the total of a response

REFUSED = (
    Idle(
        "algorithm",
        (
            "adv_estimator", "lam", "advantage_whiten", "loss_normalizer", "kl_in", "kl_penalty",
            "kl_ctrl", "rollout_is_threshold", *OF_TOKEN_REWARDS, *OF_PLACES,
        ),
        WITH_STAGE,
        _prefers_pairs,
    ),
    Idle(
        "actor_rollout",
        (
            "policy_loss", "clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c",
            "entropy_coeff",
        ),
        WITH_STAGE,
        _prefers_pairs,
    ),
    Idle(
        "actor_rollout",
        ("dpo_beta", "dpo_loss_type"),
        WITH_STAGE,
        lambda config: not _prefers_pairs(config),
    ),
    Idle(
        "algorithm",
        ("lam",),
        WITH_ESTIMATOR,
        lambda config: not (_prefers_pairs(config) or config.algorithm.estimator.needs_critic),
    ),
    Idle(
        "algorithm",
        OF_PLACES,
        WITH_ESTIMATOR,
        lambda config: not (_prefers_pairs(config) or config.algorithm.estimator.discounts),
    ),
    Idle(
        "algorithm.kl_ctrl",
        ("target_kl", "horizon"),
        f"with {ref('algorithm.kl_ctrl.type')}=fixed",
        lambda config: (
            not _prefers_pairs(config) and config.algorithm.kl_ctrl.type is KlControl.FIXED
        ),
    ),
    Idle("algorithm", OF_TOKEN_REWARDS, WITH_ESTIMATOR, _returns_total_scores),
    Idle(
        "actor_rollout",
        ("clip_ratio",),
        f"with both {ref('actor_rollout.clip_ratio_low')} and clip_ratio_high",
        lambda config: (
            not _prefers_pairs(config)
            and None
            not in (config.actor_rollout.clip_ratio_low, config.actor_rollout.clip_ratio_high)
        ),
    ),
    Idle(
        "algorithm",
        ("max_num_gen_batches",),
        f"with {ref('algorithm.filter_groups')}=false",
        lambda config: not config.algorithm.filter_groups,
    ),
    Idle(
        "algorithm",
        ("overlong_penalty_factor",),
        f"with {ref('algorithm.overlong_buffer_len')}=0",
        lambda config: not config.algorithm.overlong_buffer_len,
    ),
)  # fmt: skip

OVER_TRAIN_ITERS = "with training.train_iters={config.training.train_iters}, which is smaller"
WITHOUT_VALIDATION = "with validation.interval=0, before=false and after=false"
LOCALLY = "with runtime.kind=local"
WITHOUT_CLUSTER = "without a cluster that is joined (runtime.address)"
RESTARTS = ("node_wait_s", "allow_shrink")

NOTED = (
    Idle(
        "training",
        ("max_skipped",),
        "with training.nan_policy=raise",
        lambda config: config.training.nan_policy is NanPolicy.RAISE,
    ),
    Idle(
        "training",
        ("resume",),
        "with training.new_run=true",
        lambda config: config.training.new_run,
    ),
    Idle(
        "logging",
        ("samples_file_mb",),
        "with logging.samples=0",
        lambda config: config.logging.samples == 0,
    ),
    Idle(
        "training",
        ("async_save",),
        "without a save before the last iteration",
        _saves_only_at_the_end,
    ),
    Idle(
        "training",
        ("keep_every",),
        OVER_TRAIN_ITERS,
        lambda config: config.training.keep_every > config.training.train_iters,
    ),
    Idle(
        "validation",
        ("max_samples",),
        "without data.val_files or data.val_data_path",
        lambda config: not _has_validation_prompts(config),
    ),
    Idle("data", ("val_files", "val_data_path"), WITHOUT_VALIDATION, _never_validates),
    Idle("validation", ("max_samples",), WITHOUT_VALIDATION, _never_validates),
    Idle(
        "validation",
        ("interval",),
        OVER_TRAIN_ITERS,
        lambda config: config.validation.interval > config.training.train_iters,
    ),
    Idle(
        "algorithm",
        ("score_slot_limit",),
        "with algorithm.score_position=eos",
        lambda config: config.algorithm.score_position is ScorePosition.EOS,
    ),
    Idle(
        "algorithm.kl_ctrl",
        ("type", "target_kl", "horizon"),
        "with algorithm.kl_ctrl.kl_coef=0, which stays 0",
        lambda config: (
            config.algorithm.kl_ctrl.type is KlControl.ADAPTIVE
            and config.algorithm.kl_ctrl.kl_coef == 0
        ),
    ),
    Idle(
        "reward",
        ("rules",),
        "with reward.kind=model and no validation prompts",
        lambda config: (
            config.reward.kind is RewardKind.MODEL and not _has_validation_prompts(config)
        ),
    ),
    Idle(
        "reward.sandbox",
        tuple(SandboxConfig.model_fields),
        "without a rule of programs (code, code_all) in reward.rules",
        lambda config: not RULES_OF_PROGRAMS & set(config.reward.rules.values()),
    ),
    Idle("training", ("max_restarts",), LOCALLY, _is_local),
    Idle("pool_settings", ("env",), LOCALLY, _is_local),
    Idle("device", ("resource_name",), LOCALLY, _is_local),
    Idle("runtime", ("address", "allow_unauthenticated", "start_timeout_s"), LOCALLY, _is_local),
    Idle(
        "training",
        RESTARTS,
        "with training.max_restarts=0",
        lambda config: not config.training.max_restarts,
    ),
    Idle("training", RESTARTS, WITHOUT_CLUSTER, _joins_no_cluster),
    Idle("device", ("devices_per_node",), WITHOUT_CLUSTER, _joins_no_cluster),
    Idle("pool_settings", ("wait_s", "bad_nodes"), WITHOUT_CLUSTER, _joins_no_cluster),
    Idle(  # processes of torchrun may stand on several hosts
        "training",
        ("no_shared_storage",),
        WITHOUT_CLUSTER,
        lambda config: _joins_no_cluster(config) and not _is_local(config),
    ),
    Idle(
        "pool_settings",
        ("tensor_parallel_spans_nodes",),
        "with pools of one node each",
        lambda config: all(len(nodes) == 1 for nodes in config.resource_pool.values()),
    ),
    Idle(
        "actor_rollout",
        ("temperature", "top_k", "top_p"),
        "with actor_rollout.do_sample=false",
        lambda config: not config.actor_rollout.do_sample,
    ),
    Idle(
        "actor_rollout",
        ("top_k", "top_p"),
        "with actor_rollout.fixed_responses",
        lambda config: config.actor_rollout.fixed_responses is not None,
    ),
    Idle(
        "actor_rollout",
        ("min_new_tokens", "num_samples_per_step"),
        "with actor_rollout.fixed_responses",
        _generates_nothing,
    ),
)

OF_LLAMA3 = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
OF_FULL_RECOMPUTE = ("recompute_method", "recompute_num_layers")
LEARNING = (Role.ACTOR_ROLLOUT, Role.CRITIC)
FROZEN = (Role.REF, Role.REWARD)

NOTED_OF_ROLES = (
    RoleIdle(
        CONFIGURED,
        ("rope_scaling_factor", *OF_LLAMA3),
        "with rope_scaling_type=null",
        lambda config, role: config.role(role).architecture.rope_scaling_type is None,
    ),
    RoleIdle(
        CONFIGURED,
        OF_LLAMA3,
        "with rope_scaling_type=linear",
        lambda config, role: config.role(role).architecture.rope_scaling_type is RopeScaling.LINEAR,
    ),
    RoleIdle(
        (Role.ACTOR_ROLLOUT, *FROZEN),
        ("init_method_std",),
        "where all weights are loaded",
        lambda config, role: True,
    ),
    RoleIdle(
        FROZEN,
        ("moe_router_load_balancing_type", "moe_aux_loss_coeff"),
        "in a role that learns nothing",
        lambda config, role: True,
    ),
    RoleIdle(
        CONFIGURED,
        ("sequence_parallel",),
        "with tensor_model_parallel_size=1",
        lambda config, role: config.role(role).tensor_model_parallel_size == 1,
    ),
    RoleIdle(
        LEARNING,
        OF_FULL_RECOMPUTE,
        "with recompute={section.recompute.value}",
        lambda config, role: _learner(config, role).recompute is not Recompute.FULL,
    ),
    RoleIdle(
        CONFIGURED,
        ("micro_batch_size",),
        "with max_tokens_per_micro_batch={section.max_tokens_per_micro_batch}",
        lambda config, role: config.role(role).max_tokens_per_micro_batch is not None,
    ),
    RoleIdle(
        LEARNING,
        ("min_lr",),
        "with lr_decay_style=constant",
        lambda config, role: (
            _learner(config, role).optimizer.lr_decay_style is LrDecayStyle.CONSTANT
        ),
    ),
    RoleIdle(
        LEARNING,
        ("lr_warmup_fraction",),
        "with training.train_iters={config.training.train_iters}: less than one iteration",
        lambda config, role: (
            _learner(config, role).optimizer.lr_warmup_fraction * config.training.train_iters < 1
        ),
    ),
    RoleIdle(
        LEARNING,
        ("use_distributed_optimizer",),
        "with one data-parallel rank",
        lambda config, role: config.layout(role).dp == 1,
    ),
)


def refuse_idle_keys(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem for each key of `REFUSED` that differs from its default."""
    for idle in REFUSED:
        if idle.condition(config):
            for key in idle.keys:
                value, default = _value_and_default(config, idle.section, key)
                if value != default:
                    yield Problem(
                        f"{idle.section}.{key}",
                        f"has no effect {idle.reason.format(config=config)}",
                        None if key == "kl_ctrl" else value,
                        "remove it",
                    )


def find_idle_keys(
    config: RunConfig, origins: Mapping[tuple[str, str], str]
) -> Iterator[tuple[str, str]]:
    """Yield (`no effect ...`, `key=value` as the user wrote it) of each key for a note.

    origins: (section, key) -> YAML key. A YAML key that several roles share is idle only where it
             is idle for all of them.
    """
    reasons = _noted_keys(config)
    for (section, key), reason in reasons.items():
        path = origins.get((section, key), f"{YAML_NAMES.get(section, section)}.{key}")
        shared = [place for place, origin in origins.items() if origin == path]
        idle = all(place in reasons for place in shared) and not path.startswith(FROM_FOLDER)
        value, default = _value_and_default(config, section, key)
        if idle and value != default:
            plain = list(value) if isinstance(value, tuple) else getattr(value, "value", value)
            yield f"no effect {reason}", f"{path}={format_value(plain)}"


def _noted_keys(config: RunConfig) -> dict[tuple[str, str], str]:
    """Map (section, key) to the reason, for all keys without effect, with any value."""
    found = {
        (idle.section, key): idle.reason.format(config=config)
        for idle in NOTED
        if idle.condition(config)
        for key in idle.keys
    }
    for role in config.roles:
        section = config.role(role)
        if section.architecture is None:  # the reward is a rule
            continue
        for idle in NOTED_OF_ROLES:
            if role in idle.roles and idle.condition(config, role):
                reason = idle.reason.format(config=config, section=section)
                found |= {(role.value, key): reason for key in idle.keys}
    return found


def _value_and_default(config: RunConfig, section: str, key: str) -> tuple[Any, Any]:
    """Value and default of a key of a section, or of its architecture or optimizer."""
    holder: BaseModel = attrgetter(section)(config)
    if key not in type(holder).model_fields:
        nested = [getattr(holder, name, None) for name in ("architecture", "optimizer")]
        holder = next(part for part in nested if part and key in type(part).model_fields)
    return getattr(holder, key), type(holder).model_fields[key].default
