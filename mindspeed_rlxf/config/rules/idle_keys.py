"""Find keys without effect, because another key switches their feature off.

They are legal, so that a user can switch a feature on and off, and are listed in a note. A key that
has its default value is never reported. Keys that contradict the stage or the estimator are errors,
see `contradictions`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from pydantic import BaseModel

from mindspeed_rlxf.config.enums import (
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
from mindspeed_rlxf.config.roles import LearningConfig
from mindspeed_rlxf.config.rules.host import joined_address
from mindspeed_rlxf.config.sandbox import SandboxConfig
from mindspeed_rlxf.config.schema import PlanConfig, RunConfig
from mindspeed_rlxf.config.suggest import format_value

YAML_NAMES = {"pool_settings": "resource_pool"}
FROM_FOLDER = "model.auto."
"""Origin of keys that come from a config.json, not from the user."""
OF_LLAMA3 = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


class Idle(NamedTuple):
    """Keys of one section that have no effect.

    section: dotted attribute of RunConfig
    keys:    its own, or those of its architecture or optimizer
    reason:  completes "has no effect ..."
    """

    section: str
    keys: tuple[str, ...]
    reason: str


def find_idle_keys(
    config: RunConfig, origins: Mapping[tuple[str, str], str]
) -> Iterator[tuple[str, str]]:
    """Yield (`no effect ...`, `key=value`) for each idle key with a value other than its default.

    Keys read from a checkpoint's config.json (`model: auto`) are left out. A key that the user
    wrote once for several roles is yielded only if it has no effect in any, then once for each.
    origins: (section, key) -> key as the user wrote it; where absent, `section.key` is shown
    """
    reasons = {
        (idle.section, key): idle.reason for idle in _find_all_idle(config) for key in idle.keys
    }
    for (section, key), reason in reasons.items():
        path = origins.get((section, key), f"{YAML_NAMES.get(section, section)}.{key}")
        shared = [place for place, origin in origins.items() if origin == path]
        idle = all(place in reasons for place in shared) and not path.startswith(FROM_FOLDER)
        value, default = value_and_default(config, section, key)
        if idle and value != default:
            plain = list(value) if isinstance(value, tuple) else getattr(value, "value", value)
            yield f"no effect {reason}", f"{path}={format_value(plain)}"


def value_and_default(config: RunConfig, section: str, key: str) -> tuple[Any, Any]:
    """Return (value, default) of the key `section.key`.

    A key that the section's type lacks is that of its architecture, else of its optimizer; one of
    them must have it. The default is PydanticUndefined for a key without a constant default.
    section: location in the config, may be dotted
    """
    holder: BaseModel = attrgetter(section)(config)
    if key not in type(holder).model_fields:
        nested = [getattr(holder, name, None) for name in ("architecture", "optimizer")]
        holder = next(part for part in nested if part and key in type(part).model_fields)
    return getattr(holder, key), type(holder).model_fields[key].default


def _find_all_idle(config: RunConfig) -> Iterator[Idle]:
    """Yield all keys without effect, also those that have their default value.

    The caller must compare values. A key may come twice, with different reasons; the last one
    counts. Roles without an architecture are left out.
    """
    yield from _find_idle_of_training(config)
    yield from _find_idle_of_validation(config)
    yield from _find_idle_of_algorithm(config)
    yield from _find_idle_of_runtime(config)
    yield from _find_idle_of_generation(config)
    yield from _find_idle_of_data(config)
    yield from _find_idle_of_plan(config)
    for role in config.roles:
        if config.role(role).architecture is not None:  # None: the reward is a rule
            yield from _find_idle_of_model(config, role)
            yield from _find_idle_of_micro_batches(config, role)
            yield from _find_idle_of_optimizer(config, role)
            yield from _find_idle_of_offload(config, role)


def _find_idle_of_training(config: RunConfig) -> Iterator[Idle]:
    training = config.training
    saves_before = 0 < training.save_interval < training.train_iters
    if training.nan_policy is NanPolicy.RAISE:
        yield Idle("training", ("max_skipped",), "with training.nan_policy=raise")
    if training.new_run:
        yield Idle("training", ("resume",), "with training.new_run=true")
    if config.logging.samples == 0:
        yield Idle("logging", ("samples_file_mb",), "with logging.samples=0")
    if not (saves_before or training.seconds_between_saves):
        yield Idle("training", ("async_save",), "without a save before the last iteration")
    if config.training.stage is Stage.RAY_ONLINE_DPO or config.algorithm.kl_ctrl.kl_coef > 0:
        anyway = "where a reward or a loss reads the reference anyway"
        yield Idle("logging", ("reference_kl",), anyway)
    if training.keep_every > training.train_iters:
        yield Idle("training", ("keep_every",), _over_train_iters(config))


def _over_train_iters(config: RunConfig) -> str:
    return f"with training.train_iters={config.training.train_iters}, which is smaller"


def _find_idle_of_data(config: RunConfig) -> Iterator[Idle]:
    if not (config.data.train_files or config.data.val_files):
        made = "with indexed data sets, whose prompts are tokenized already"
        yield Idle("data", ("chat_template_kwargs", "system_prompt", "invalid_rows"), made)


def _find_idle_of_plan(config: RunConfig) -> Iterator[Idle]:
    if not config.dry_run:
        yield Idle("plan", tuple(PlanConfig.model_fields), "without dry_run=true")


def _find_idle_of_validation(config: RunConfig) -> Iterator[Idle]:
    keys = config.validation
    how = (
        "max_samples", "n_samples", "do_sample", "temperature", "top_k", "top_p", "reward",
        "pass_score", "best_metric",
    )  # fmt: skip
    if not config.has_validation_prompts:
        without = "without data.val_files or data.val_data_path"
        yield Idle("validation", how, without)
    elif not (keys.interval or keys.before or keys.after or keys.only):
        never = "with validation.interval=0, before=false and after=false"
        yield Idle("data", ("val_files", "val_data_path"), never)
        yield Idle("validation", how, never)
    if keys.only:
        times = ("interval", "before", "after", "best_metric")
        yield Idle("validation", times, "with validation.only=true")
    if not keys.do_sample:
        sampling = ("temperature", "top_k", "top_p")
        yield Idle("validation", sampling, "with validation.do_sample=false")
    if keys.interval > config.training.train_iters:
        yield Idle("validation", ("interval",), _over_train_iters(config))


def _find_idle_of_algorithm(config: RunConfig) -> Iterator[Idle]:
    control = config.algorithm.kl_ctrl
    if config.algorithm.score_position is ScorePosition.EOS:
        yield Idle("algorithm", ("score_slot_limit",), "with algorithm.score_position=eos")
    if control.type is KlControl.ADAPTIVE and control.kl_coef == 0:
        stays = "with algorithm.kl_ctrl.kl_coef=0, which stays 0"
        yield Idle("algorithm.kl_ctrl", ("type", "target_kl", "horizon"), stays)
    yield from _find_idle_of_reward(config)


def _find_idle_of_reward(config: RunConfig) -> Iterator[Idle]:
    reward, by_model = config.reward, config.reward.kind is not RewardKind.RULE
    if not reward.runs_programs:
        without = "without a rule of programs (code, code_all) in reward.rules or reward.functions"
        yield Idle("reward.sandbox", tuple(SandboxConfig.model_fields), without)
    if reward.parts:
        return
    yield Idle("reward", ("allow_changed_function",), "without functions")
    if by_model:
        beside = ("model_weight", "failed_score", "max_failed")
        yield Idle("reward", beside, "without functions beside the reward model")
    if by_model and not config.has_validation_prompts:
        never = f"with reward.kind={reward.kind.value} and no validation prompts"
        yield Idle("reward", ("rules",), never)
    elif by_model and config.validation.reward is RewardKind.MODEL:
        asked = f"with reward.kind={reward.kind.value} and validation.reward=model"
        yield Idle("reward", ("rules",), asked)


def _find_idle_of_runtime(config: RunConfig) -> Iterator[Idle]:
    is_local = config.runtime.kind is RuntimeKind.LOCAL
    restarts = ("node_wait_s", "allow_shrink")
    if is_local:
        addresses = ("address", "allow_unauthenticated", "start_timeout_s")
        yield Idle("training", ("max_restarts",), "with runtime.kind=local")
        yield Idle("pool_settings", ("env",), "with runtime.kind=local")
        yield Idle("device", ("resource_name",), "with runtime.kind=local")
        yield Idle("runtime", addresses, "with runtime.kind=local")
    if not config.training.max_restarts:
        yield Idle("training", restarts, "with training.max_restarts=0")
    if is_local or joined_address(config) is None:
        alone = "without a cluster that is joined (runtime.address)"
        yield Idle("training", restarts, alone)
        yield Idle("device", ("devices_per_node",), alone)
        yield Idle("pool_settings", ("wait_s", "bad_nodes"), alone)
        if not is_local:  # processes of torchrun may run on several hosts
            yield Idle("training", ("no_shared_storage",), alone)
    if all(len(nodes) == 1 for nodes in config.resource_pool.values()):
        yield Idle("pool_settings", ("tensor_parallel_spans_nodes",), "with pools of one node each")


def _find_idle_of_generation(config: RunConfig) -> Iterator[Idle]:
    actor, fixed = config.actor_rollout, "with actor_rollout.fixed_responses"
    if not actor.do_sample:
        sampling = ("temperature", "top_k", "top_p")
        yield Idle("actor_rollout", sampling, "with actor_rollout.do_sample=false")
    if actor.fixed_responses is None:
        return
    yield Idle("actor_rollout", ("top_k", "top_p"), fixed)
    if not (config.algorithm.estimator.reads_greedy or config.has_validation_prompts):
        yield Idle("actor_rollout", ("min_new_tokens", "num_samples_per_step"), fixed)


def _find_idle_of_model(config: RunConfig, role: Role) -> Iterator[Idle]:
    """Yield keys of a role's architecture that have no effect in this role.

    Rotary keys that the scaling type does not read; `init_method_std` except in the critic;
    balancing of experts in reference and reward.
    """
    scaling = config.role(role).architecture.rope_scaling_type
    if scaling is None:
        factors = ("rope_scaling_factor", *OF_LLAMA3)
        yield Idle(role.value, factors, "with rope_scaling_type=null")
    if scaling is RopeScaling.LINEAR:
        yield Idle(role.value, OF_LLAMA3, "with rope_scaling_type=linear")
    if role is not Role.CRITIC:
        yield Idle(role.value, ("init_method_std",), "where all weights are loaded")
    if role in (Role.REF, Role.REWARD):
        balance = ("moe_router_load_balancing_type", "moe_aux_loss_coeff")
        yield Idle(role.value, balance, "in a role that learns nothing")


def _find_idle_of_micro_batches(config: RunConfig, role: Role) -> Iterator[Idle]:
    section = config.role(role)
    limit = section.max_tokens_per_micro_batch
    if section.tensor_model_parallel_size == 1:
        yield Idle(role.value, ("sequence_parallel",), "with tensor_model_parallel_size=1")
    if limit is not None:
        yield Idle(role.value, ("micro_batch_size",), f"with max_tokens_per_micro_batch={limit}")


def _find_idle_of_optimizer(config: RunConfig, role: Role) -> Iterator[Idle]:
    section, iterations = config.role(role), config.training.train_iters
    if not isinstance(section, LearningConfig):
        return
    if section.recompute is not Recompute.FULL:
        layers = ("recompute_method", "recompute_num_layers")
        yield Idle(role.value, layers, f"with recompute={section.recompute.value}")
    if section.optimizer.lr_decay_style is LrDecayStyle.CONSTANT:
        yield Idle(role.value, ("min_lr",), "with lr_decay_style=constant")
    if section.optimizer.lr_warmup_fraction * config.learning_iters(role) < 1:
        short = f"with training.train_iters={iterations}: less than one iteration"
        yield Idle(role.value, ("lr_warmup_fraction",), short)
    optimizer, overlaps = section.optimizer, ("overlap_grad_reduce", "overlap_param_gather")
    if not (optimizer.use_distributed_optimizer and optimizer.overlap_grad_reduce):
        both = "without use_distributed_optimizer and overlap_grad_reduce"
        yield Idle(role.value, ("overlap_param_gather",), both)
    if config.layout(role).dp == 1:
        alone = "with one data-parallel rank"
        yield Idle(role.value, ("use_distributed_optimizer", *overlaps), alone)


def _find_idle_of_offload(config: RunConfig, role: Role) -> Iterator[Idle]:
    """Yield the key `offload.weights` of the role if no other role has a model on its devices.

    A reward of kind rule has no model.
    """
    others = [other for other in config.roles_of(config.pool_of(role)) if other is not role]
    rule = config.reward.kind is RewardKind.RULE
    if all(other is Role.REWARD and rule for other in others):
        alone = "with no model of another role on its devices"
        yield Idle(f"{role.value}.offload", ("weights",), alone)
