"""verl's roles, the workers and pools that a script gives them, and what they are here."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from mindspeed_rlxf.config import enums
from mindspeed_rlxf.config.problems import ConfigError, Problem
from mindspeed_rlxf.config.raw_config import RawConfig
from mindspeed_rlxf.roles.actor import ActorRole
from mindspeed_rlxf.roles.critic import CriticRole
from mindspeed_rlxf.roles.reference import ReferenceRole
from mindspeed_rlxf.roles.reward import RewardRole
from mindspeed_rlxf.roles.rollout import RolloutRole

ACTOR = enums.Role.ACTOR_ROLLOUT
ROLLOUT = enums.Role.ROLLOUT
REF = enums.Role.REF
MAPPING = "role_worker_mapping"
"""Argument of verl's trainer."""
WORKER_CLASSES: dict[enums.Role, type] = {
    ACTOR: ActorRole, ROLLOUT: RolloutRole, enums.Role.CRITIC: CriticRole,
    REF: ReferenceRole, enums.Role.REWARD: RewardRole,
}  # fmt: skip
RENAMED_METHODS = {
    "update_actor": "loss(log_probs, old_log_probs, advantages, clip, lengths)",
    "compute_log_prob": "log_probs(rollouts)",
    "compute_ref_log_prob": "log_probs(rollouts)",
    "generate_sequences": "generate of a class registered with register_rollout_engine",
    "compute_values": "values(rollouts)",
    "update_critic": "loss(experience, rows, values)",
    "compute_rm_score": "score(rollouts)",
}
"""Method of verl's workers, which nothing calls here -> what to override."""


class Role(Enum):
    """What a group of workers does; the value says which of our roles. `Role(3)` is verl's."""

    Actor = (ACTOR,)
    Rollout = (ROLLOUT,)
    ActorRollout = (ACTOR, ROLLOUT)
    Critic = (enums.Role.CRITIC,)
    RefPolicy = (REF,)
    RewardModel = (enums.Role.REWARD,)
    ActorRolloutRef = (ACTOR, ROLLOUT, REF)

    @classmethod
    def _missing_(cls, value: object) -> "Role | None":
        members = list(cls)
        if isinstance(value, int) and 0 <= value < len(members):
            return members[value]
        return None


@dataclass(frozen=True)
class ResourcePoolManager:
    """Pools by name, each with the processes of its nodes, and each role's pool."""

    resource_pool_spec: Mapping[str, Sequence[int]]
    mapping: Mapping[Role, str]


def assign_workers(
    raw: RawConfig, workers: Mapping[Role, type], manager: ResourcePoolManager
) -> dict[enums.Role, type]:
    """Return the worker class of each of our roles, and set our keys for pools and placement.

    Actor and rollout on two pools split one. A reward class of the user scores alone.

    Raises:
        ConfigError: A role lacks its pool or a fitting class, or has two.
    """
    _check_roles(workers)
    pools = {name: list(sizes) for name, sizes in manager.resource_pool_spec.items()}
    classes: dict[enums.Role, type] = {}
    placement: dict[enums.Role, str] = {}
    for verl_role, decorated in workers.items():
        # verl's scripts decorate the class with ray.remote.
        worker = getattr(decorated, "__ray_actor_class__", decorated)
        pool = manager.mapping.get(verl_role)
        if pool not in pools:
            rule = f"must name a pool of resource_pool_spec for {verl_role}"
            raise ConfigError(Problem("mapping", rule, pool, f"use {', '.join(pools)}"))
        for role in verl_role.value:
            if role in classes:
                rule = f"must have {role.value} once, {verl_role} has it again"
                raise ConfigError(Problem(MAPPING, rule, remedy=f"remove {verl_role}"))
            classes[role] = _class_for(role, verl_role, worker)
            placement[role] = str(pool)
        _check_methods(worker)
    missing = [role.value for role in (ACTOR, ROLLOUT) if role not in classes]
    if missing:
        rule = f"must have a worker for {' and '.join(missing)}"
        raise ConfigError(Problem(MAPPING, rule, remedy="use Role.ActorRollout"))
    reward_section = raw.sections["reward"]
    reward_class = classes.get(enums.Role.REWARD, RewardRole)
    if reward_class is not RewardRole and reward_section.get("kind") == enums.RewardKind.RULE.value:
        reward_section["kind"] = enums.RewardKind.ROLE.value
    actor_pool = placement[ACTOR]
    rollout_pool = placement.pop(ROLLOUT)
    if actor_pool != rollout_pool:
        num_training = sum(pools.pop(actor_pool))
        num_generating = sum(pools.pop(rollout_pool))
        both = f"{actor_pool}+{rollout_pool}"
        pools[both] = [num_training + num_generating]
        placement[ACTOR] = both
        actor_section = raw.sections[ACTOR.value]
        actor_section["num_gpus_for_train"] = num_training
        actor_section["num_gpus_for_infer"] = num_generating
    raw.sections["resource_pool"] = pools
    raw.sections["placement"] = {role.value: pool for role, pool in placement.items()}
    return classes


def _check_roles(workers: Mapping[Role, type]) -> None:
    for role in workers:
        if not isinstance(role, Role):
            rule = "must have roles of mindspeed_rlxf.api"
            remedy = "use one; a reward of your own is Role.RewardModel with reward.kind=role"
            raise ConfigError(Problem(MAPPING, rule, str(role), remedy))


def _class_for(role: enums.Role, verl_role: Role, worker: type) -> type:
    """Return the class of one of our roles, which a class for the actor has for rollout too."""
    needed = WORKER_CLASSES[role]
    if issubclass(worker, ActorRole) and role in (ROLLOUT, REF):
        return needed
    if not issubclass(worker, needed):
        rule = f"must have a subclass of {needed.__name__} for {verl_role}"
        raise ConfigError(Problem(MAPPING, rule, worker.__name__, "use one"))
    return worker


def _check_methods(worker: type) -> None:
    """Raise ConfigError if a class overrides a method of verl's workers, which is not called."""
    for base in worker.__mro__:
        if base.__module__.startswith("mindspeed_rlxf."):
            return
        for method in sorted(RENAMED_METHODS.keys() & vars(base).keys()):
            if _has_our_signature(method, vars(base)[method]):
                continue
            rule = f"must not override {method}, which is never called"
            remedy = f"override {RENAMED_METHODS[method]}"
            raise ConfigError(Problem(MAPPING, rule, worker.__name__, remedy))


def _has_our_signature(method: str, function: Callable[..., Any]) -> bool:
    """Whether a method is one of our critic, which has some of verl's names."""
    ours = getattr(CriticRole, method, None)
    if ours is None:
        return False
    return [*inspect.signature(function).parameters] == [*inspect.signature(ours).parameters]
