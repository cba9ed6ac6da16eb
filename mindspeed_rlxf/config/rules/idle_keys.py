"""Keys that wait for another key: legal, without effect as things are, and told by name.

`without_effect` refuses what contradicts the stage; these are keys that people leave in a YAML
while they switch another one on and off. A key that has its default asks for nothing and is not
told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter

from pydantic import BaseModel

from mindspeed_rlxf.config.enums import (
    KlControl,
    LrDecayStyle,
    NanPolicy,
    RewardKind,
    Role,
    RopeScaling,
    RuntimeKind,
    ScorePosition,
)
from mindspeed_rlxf.config.rules.host import joined_address
from mindspeed_rlxf.config.schema import OptimizerConfig, RoleConfig, RunConfig
from mindspeed_rlxf.config.suggest import written

OF_LLAMA3 = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
OF_BALANCE = ("moe_router_load_balancing_type", "moe_aux_loss_coeff")
OF_SAMPLING = ("temperature", "top_k", "top_p")
YAML_NAMES = {"pool_settings": "resource_pool"}
FROM_FOLDER = "model.auto."
"""Origin of keys that nobody wrote: config.json has them."""


@dataclass(frozen=True)
class Idle:
    """Keys of one section, and when they have no effect: the key that they wait for."""

    section: str
    keys: tuple[str, ...]
    when: str


def idle_keys(
    config: RunConfig, origins: Mapping[tuple[str, str], str]
) -> Iterator[tuple[str, str]]:
    """(when it has no effect, `key=value` as written) of each that differs from its default.

    origins: (section, key) -> YAML key. One that several roles share is idle where it is for all.
    """
    found = {(idle.section, key): idle for idle in _idle(config) for key in idle.keys}
    for (section, key), idle in found.items():
        values = _holder(attrgetter(section)(config), key)
        value, usual = getattr(values, key), f"{YAML_NAMES.get(section, section)}.{key}"
        path = origins.get((section, key), usual)
        same = [place for place, origin in origins.items() if origin == path]
        told = all(place in found for place in same) and not path.startswith(FROM_FOLDER)
        if told and value != type(values).model_fields[key].default:
            plain = list(value) if isinstance(value, tuple) else getattr(value, "value", value)
            yield f"no effect {idle.when}", f"{path}={written(plain)}"


def _holder(section: BaseModel, key: str) -> BaseModel:
    """The part of a role's section that has the key."""
    nested = [getattr(section, name, None) for name in ("architecture", "optimizer")]
    parts = [section, *(part for part in nested if isinstance(part, BaseModel))]
    return next(part for part in parts if key in type(part).model_fields)


def _idle(config: RunConfig) -> Iterator[Idle]:
    yield from [*_run(config), *_saves(config), *_validation(config), *_algorithm(config)]
    yield from [*_places(config), *_actor(config)]
    for role in config.roles:
        section = config.role(role)
        if section.architecture is not None:  # that of a rule is
            yield from [*_architecture(role, section), *_batches(role, section)]
        if role in (Role.ACTOR_ROLLOUT, Role.CRITIC):
            yield from _optimizer(config, role)


def _run(config: RunConfig) -> Iterator[Idle]:
    training = config.training
    if training.nan_policy is NanPolicy.RAISE:
        yield Idle("training", ("max_skipped",), "with training.nan_policy=raise")
    if training.new_run:
        yield Idle("training", ("resume",), "with training.new_run=true")
    if config.logging.samples == 0:
        yield Idle("logging", ("samples_file_mb",), "with logging.samples=0")


def _saves(config: RunConfig) -> Iterator[Idle]:
    training = config.training
    by_number = 0 < training.save_interval < training.train_iters
    if not by_number and not training.seconds_between_saves:
        yield Idle("training", ("async_save",), "without a save before the last iteration")
    if training.keep_every > training.train_iters:
        when = f"with training.train_iters={training.train_iters}, which it is over"
        yield Idle("training", ("keep_every",), when)


def _validation(config: RunConfig) -> Iterator[Idle]:
    validation, data = config.validation, config.data
    if not data.val_files and not data.val_data_path:
        yield Idle("validation", ("max_samples",), "without data.val_files or data.val_data_path")
    elif not validation.interval and not validation.before and not validation.after:
        when = "with validation.interval=0, before=false and after=false"
        yield Idle("data", ("val_files", "val_data_path"), when)
        yield Idle("validation", ("max_samples",), when)
    if validation.interval > config.training.train_iters:
        when = f"with training.train_iters={config.training.train_iters}, which it is over"
        yield Idle("validation", ("interval",), when)


def _algorithm(config: RunConfig) -> Iterator[Idle]:
    algorithm, control = config.algorithm, config.algorithm.kl_ctrl
    if algorithm.score_position is ScorePosition.EOS:
        yield Idle("algorithm", ("score_slot_limit",), "with algorithm.score_position=eos")
    if control.type is KlControl.ADAPTIVE and control.kl_coef == 0:
        keys = ("type", "target_kl", "horizon")
        yield Idle("algorithm.kl_ctrl", keys, "with algorithm.kl_ctrl.kl_coef=0, which stays 0")
    has_prompts = bool(config.data.val_files or config.data.val_data_path)
    if config.reward.kind is RewardKind.MODEL and not has_prompts:
        yield Idle("reward", ("rules",), "with reward.kind=model and no validation prompts")


def _places(config: RunConfig) -> Iterator[Idle]:
    local, settings = config.runtime.kind is RuntimeKind.LOCAL, "pool_settings"
    if local:
        when = "with runtime.kind=local"
        yield Idle("training", ("max_restarts",), when)
        yield Idle(settings, ("env",), when)
        yield Idle("device", ("resource_name",), when)
        yield Idle("runtime", ("address", "allow_unauthenticated", "start_timeout_s"), when)
    elif not config.training.max_restarts:
        yield Idle("training", ("node_wait_s", "allow_shrink"), "with training.max_restarts=0")
    if local or joined_address(config) is None:
        when = "without a cluster that is joined (runtime.address)"
        yield Idle("training", ("node_wait_s", "allow_shrink"), when)
        yield Idle("device", ("devices_per_node",), when)
        yield Idle(settings, ("wait_s", "bad_nodes"), when)
        if not local:  # processes of torchrun may stand on several hosts
            yield Idle("training", ("no_shared_storage",), when)
    if all(len(processes) == 1 for processes in config.resource_pool.values()):
        yield Idle(settings, ("tensor_parallel_spans_nodes",), "with pools of one node each")


def _actor(config: RunConfig) -> Iterator[Idle]:
    actor, data, name = config.actor_rollout, config.data, Role.ACTOR_ROLLOUT.value
    if not actor.do_sample:
        yield Idle(name, OF_SAMPLING, "with actor_rollout.do_sample=false")
    if actor.fixed_responses is not None:
        when = "with actor_rollout.fixed_responses"
        yield Idle(name, ("top_k", "top_p"), when)
        greedy = config.algorithm.estimator.reads_greedy
        if not (greedy or data.val_files or data.val_data_path):  # nothing else is generated
            yield Idle(name, ("min_new_tokens", "num_samples_per_step"), when)


def _architecture(role: Role, section: RoleConfig) -> Iterator[Idle]:
    a = section.architecture
    if a.rope_scaling_type is None:
        keys = ("rope_scaling_factor", *OF_LLAMA3)
        yield Idle(role.value, keys, "with rope_scaling_type=null")
    elif a.rope_scaling_type is RopeScaling.LINEAR:
        yield Idle(role.value, OF_LLAMA3, "with rope_scaling_type=linear")
    if role is not Role.CRITIC:
        yield Idle(role.value, ("init_method_std",), "where all weights are loaded")
    if role in (Role.REF, Role.REWARD):
        yield Idle(role.value, OF_BALANCE, "in a role that learns nothing")


def _batches(role: Role, section: RoleConfig) -> Iterator[Idle]:
    if section.tensor_model_parallel_size == 1:
        yield Idle(role.value, ("sequence_parallel",), "with tensor_model_parallel_size=1")
    if section.max_tokens_per_micro_batch is not None:
        when = f"with max_tokens_per_micro_batch={section.max_tokens_per_micro_batch}"
        yield Idle(role.value, ("micro_batch_size",), when)


def _optimizer(config: RunConfig, role: Role) -> Iterator[Idle]:
    section = config.value_model if role is Role.CRITIC else config.actor_rollout
    optimizer: OptimizerConfig = section.optimizer
    if optimizer.lr_decay_style is LrDecayStyle.CONSTANT:
        yield Idle(role.value, ("min_lr",), "with lr_decay_style=constant")
    if int(optimizer.lr_warmup_fraction * config.training.train_iters) == 0:
        when = f"with training.train_iters={config.training.train_iters}: less than one iteration"
        yield Idle(role.value, ("lr_warmup_fraction",), when)
    if config.layout(role).dp == 1:
        yield Idle(role.value, ("use_distributed_optimizer",), "with one data-parallel rank")
