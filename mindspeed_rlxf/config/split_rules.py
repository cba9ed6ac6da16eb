"""Rules of an actor whose pool is split: some devices train, the others generate."""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_rlxf.config.enums import Role, RuntimeKind
from mindspeed_rlxf.config.layout import part_of
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.config.suggest import around, divisors, multiples_around, use

TRAIN, INFER = "actor_rollout.num_gpus_for_train", "actor_rollout.num_gpus_for_infer"
ROLLOUT_TP = "rollout.tensor_model_parallel_size"


def check_split(config: RunConfig) -> Iterator[str]:
    """Every rule broken, for a pool that is split and for one that is not."""
    actor = config.actor_rollout
    train, infer = actor.num_gpus_for_train, actor.num_gpus_for_infer
    if train is None and infer is None:
        yield from _shared(config)
    elif train is None or infer is None:
        given, missing = (INFER, TRAIN) if train is None else (TRAIN, INFER)
        yield (
            f"{missing} is required with {given}={infer or train}; give both, which add up to the "
            "pool's devices, or remove both: then all of them train and generate"
        )
    else:
        yield from _sum(config, train, infer)
        yield from _alone(config)
        yield from _replicas(config, train, infer)
        if config.runtime.kind is RuntimeKind.LOCAL:
            yield (
                f"runtime.kind=local runs every role on the same processes and cannot give "
                f"{infer} of them to the rollout ({INFER}); use runtime.kind=ray, or remove "
                f"{TRAIN} and {INFER}"
            )


def _shared(config: RunConfig) -> Iterator[str]:
    tp = config.actor_rollout.tensor_model_parallel_size
    if config.rollout_tp != tp:
        yield (
            f"{ROLLOUT_TP}={config.rollout_tp} must be actor_rollout.tensor_model_parallel_size="
            f"{tp} where the rollout shares the actor's devices; remove it, or give the rollout "
            f"devices of its own by {TRAIN} and {INFER}"
        )


def _sum(config: RunConfig, train: int, infer: int) -> Iterator[str]:
    pool = config.pool_of(Role.ACTOR_ROLLOUT)
    if pool not in config.resource_pool or config.pool_size(pool) == train + infer:
        return
    size = config.pool_size(pool)
    other = f"{INFER}={size - train}, or " if size > train else ""
    yield (
        f"{TRAIN}={train} and {INFER}={infer} must add up to resource_pool.{pool}={size}; use "
        f"{other}resource_pool.{pool}={train + infer}"
    )


def _alone(config: RunConfig) -> Iterator[str]:
    """Ranks of a split pool are two worlds, in which no role of the whole pool can live."""
    pool = config.pool_of(Role.ACTOR_ROLLOUT)
    for role in config.roles_of(pool):
        if role is not Role.ACTOR_ROLLOUT:
            yield (
                f"placement.{role.value}={pool} must be another pool, {INFER} splits this one "
                f"between training and generation; add resource_pool.{role.value} and use it, or "
                f"remove {TRAIN} and {INFER}"
            )


def _replicas(config: RunConfig, train: int, infer: int) -> Iterator[str]:
    """Generation has whole tensor-parallel groups, each on one node."""
    tp, pool = config.rollout_tp, config.pool_of(Role.ACTOR_ROLLOUT)
    if infer % tp:
        yield _uneven(config, infer, tp)
        return
    for processes in part_of(config.resource_pool.get(pool, []), train, infer):
        if processes % tp:
            yield (
                f"{INFER}={infer}: {processes} processes on a node must be a multiple of the "
                f"rollout's tensor-parallel size {tp}, which may not span nodes; "
                f"{use(multiples_around(processes, tp))} on each node"
            )


def _uneven(config: RunConfig, infer: int, tp: int) -> str:
    """Names the size where the user gave one for the rollout, else the devices."""
    if config.rollout.tensor_model_parallel_size is None:
        return (
            f"{INFER}={infer} must be a multiple of actor_rollout.tensor_model_parallel_size={tp}, "
            f"which the rollout has too; {use(multiples_around(infer, tp))}, or give {ROLLOUT_TP}"
        )
    sizes = use(around(tp, divisors(infer)))
    return f"{ROLLOUT_TP}={tp} must divide {INFER}={infer}; {sizes}"
