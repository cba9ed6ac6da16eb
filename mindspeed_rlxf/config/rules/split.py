"""Rules of an actor whose pool is split: some devices only train, all others only generate."""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_rlxf.config.enums import Role, RuntimeKind
from mindspeed_rlxf.config.errors import Problem, ref
from mindspeed_rlxf.config.layout import count_per_node
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.config.suggest import divisors, multiples_around, neighbours, use

TRAIN, INFER = "actor_rollout.num_gpus_for_train", "actor_rollout.num_gpus_for_infer"
ROLLOUT_TP = "rollout.tensor_model_parallel_size"
ACTOR_TP = "actor_rollout.tensor_model_parallel_size"


def check_split(config: RunConfig) -> Iterator[Problem]:
    """Yield problems of an actor's pool that is split into training and generating devices.

    It must have the sum of both numbers, no other role, whole TP groups and the Ray runtime.
    Without a split, a `rollout.tensor_model_parallel_size` other than the actor's is a problem.
    """
    train, infer = config.actor_rollout.num_gpus_for_train, config.actor_rollout.num_gpus_for_infer
    tp = config.actor_rollout.tensor_model_parallel_size
    if train is None and infer is None and config.rollout_tp != tp:
        yield Problem(
            ROLLOUT_TP,
            f"must be {ref(ACTOR_TP)}={tp} where the rollout shares the actor's devices",
            config.rollout_tp,
            f"remove it, or give the rollout devices of its own by {ref(TRAIN)} and {ref(INFER)}",
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
    """Yield a problem unless the generating ranks form whole tensor-parallel groups on each node.

    train, infer: numbers of ranks that train and that generate
    """
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
                    reads=(ROLLOUT_TP,),
                )
