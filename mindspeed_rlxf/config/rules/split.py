"""Rules of an actor whose pool is split: some devices only train, all others only generate."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from mindspeed_rlxf.config.enums import Role, RuntimeKind
from mindspeed_rlxf.config.errors import Problem, ref
from mindspeed_rlxf.config.layout import count_per_node
from mindspeed_rlxf.config.roles import RoleConfig
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.config.suggest import divisors, multiples_around, neighbours, use

TRAIN, INFER = "actor_rollout.num_gpus_for_train", "actor_rollout.num_gpus_for_infer"
ROLLOUT_TP = "rollout.tensor_model_parallel_size"
ACTOR_TP = "actor_rollout.tensor_model_parallel_size"
ROLLOUT_EP = "rollout.expert_model_parallel_size"
ACTOR_EP = "actor_rollout.expert_model_parallel_size"


def check_split(config: RunConfig) -> Iterator[Problem]:
    """Yield problems of an actor's pool that is split into training and generating devices.

    The pool must have as many devices as both numbers add up to, no other role, the groups that
    `_check_replicas` needs, and not runtime `local`. Without a split, a rollout size (tensor or
    expert parallel) other than the actor's is a problem. Nothing if only one number is set.
    """
    train, infer = config.actor_rollout.num_gpus_for_train, config.actor_rollout.num_gpus_for_infer
    if train is None and infer is None:
        actor = config.actor_rollout
        for key, size, actors, actors_size in (
            (ROLLOUT_TP, config.rollout_tp, ACTOR_TP, actor.tensor_model_parallel_size),
            (ROLLOUT_EP, config.rollout_ep, ACTOR_EP, actor.expert_model_parallel_size),
        ):
            if size != actors_size:
                yield Problem(
                    key,
                    f"must be {ref(actors)}={actors_size} where the rollout shares the actor's "
                    "devices",
                    size,
                    "remove it, or give the rollout devices of its own by "
                    f"{ref(TRAIN)} and {ref(INFER)}",
                )
    if train is None or infer is None:  # one without the other is refused by ActorConfig
        return
    pool = config.pool_of(Role.ACTOR_ROLLOUT)
    size, key = sum(config.resource_pool.get(pool, [train + infer])), ref(f"resource_pool.{pool}")
    if size != train + infer:
        other = f"{ref(INFER)}={size - train}, or " if size > train else ""
        yield Problem(
            TRAIN,
            f"and {ref(INFER)}={infer} must add up to {key}={size}",
            train,
            f"use {other}{key}={train + infer}",
        )
    for role in (role for role in config.roles_of(pool) if role is not Role.ACTOR_ROLLOUT):
        # The ranks of a split pool form two process groups, which fit no other role.
        yield Problem(
            f"placement.{role.value}",
            f"must be another pool, {ref(INFER)} splits this one between training and generation",
            pool,
            f"add resource_pool.{role.value} and use it, or remove {ref(TRAIN)} and {ref(INFER)}",
        )
    yield from _check_replicas(config, train, infer)
    if config.runtime.kind is RuntimeKind.LOCAL:
        yield Problem(
            "runtime.kind",
            f"runs every role on the same processes and cannot give {infer} of them to the "
            f"rollout ({ref(INFER)})",
            "local",
            f"use {ref('runtime.kind')}=ray, or remove {ref(TRAIN)} and {ref(INFER)}",
        )


def _check_replicas(config: RunConfig, train: int, infer: int) -> Iterator[Problem]:
    """Yield a problem unless the generating ranks form whole TP groups on each node."""
    tp, pool = config.rollout_tp, config.pool_of(Role.ACTOR_ROLLOUT)
    if infer % tp and config.rollout.tensor_model_parallel_size is None:
        yield Problem(
            INFER,
            f"must be a multiple of {ref(ACTOR_TP)}={tp}, which the rollout has too",
            infer,
            f"{use(multiples_around(infer, tp))}, or give {ref(ROLLOUT_TP)}",
        )
    elif infer % tp:
        yield Problem(
            ROLLOUT_TP,
            f"must divide {ref(INFER)}={infer}",
            tp,
            use(neighbours(tp, divisors(infer))),
        )
    else:
        for processes in count_per_node(config.resource_pool.get(pool, []), train, infer):
            if processes % tp:
                yield Problem(
                    INFER,
                    f"{processes} processes on a node must be a multiple of the rollout's "
                    f"tensor-parallel size {tp}, which may not span nodes",
                    infer,
                    f"{use(multiples_around(processes, tp))} on each node",
                    colon=True,
                )
        yield from _check_rollout_experts(config, infer // tp)


def _check_rollout_experts(config: RunConfig, dp: int) -> Iterator[Problem]:
    """Yield problems of the expert-parallel size of ranks that only generate, if it is above 1."""
    actor, ep = config.actor_rollout, config.rollout_ep
    if ep == 1 or actor.architecture is None:
        return
    if actor.architecture.num_experts is None:
        yield Problem(ROLLOUT_EP, f"needs experts, model.{actor.model} is dense", ep, "remove it")
        return
    yield from find_uneven_experts(ROLLOUT_EP, ep, actor, dp)


def find_uneven_experts(
    key: str, ep: int, section: RoleConfig, dp: int | None
) -> Iterator[Problem]:
    """Yield a problem if `ep` does not divide the experts, another if it does not divide `dp`.

    key:     of the expert-parallel size `ep` in the YAML
    section: of a role whose model has experts
    dp:      data-parallel size; None = not checked, the number of processes does not allow one
    """
    experts = section.architecture.num_experts
    assert experts is not None, "checked by the caller"
    remedy = use(neighbours(ep, divisors(gcd(experts, dp or experts))))
    if experts % ep:
        number = ref(f"model.{section.model}.num_experts")
        yield Problem(key, f"must divide {number}={experts}", ep, remedy)
    if dp is not None and dp % ep:
        yield Problem(key, f"must divide the data-parallel size {dp}", ep, remedy)
