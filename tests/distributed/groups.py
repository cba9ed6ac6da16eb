"""Build role groups for tests, and call the methods that several tests need."""

from collections.abc import Callable, Sequence
from typing import Any

from mindspeed_rlxf.cluster.group import RoleGroup, Sharded
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.rank_layout import ParallelLayout
from mindspeed_rlxf.config.schema import RoleConfig, RunConfig
from mindspeed_rlxf.data.batch import Experience, Rollouts
from mindspeed_rlxf.data.mini_batches import rank_steps
from mindspeed_rlxf.roles.actor import ActorGroup
from mindspeed_rlxf.roles.reports import UpdateReport
from mindspeed_rlxf.roles.rollout import RolloutGroup


def build_group(
    runtime: Any, layout: ParallelLayout, kind: Callable[..., Any], *arguments: Any,
    role: Role = Role.ACTOR_ROLLOUT,
) -> RoleGroup:  # fmt: skip
    """Build a role of class `kind` on a pool "main" of `layout.world_size` ranks.

    A runtime that keeps pools gives the same pool to each role of that size.
    """
    pool = runtime.create_pools({"main": [layout.world_size]})["main"]
    group = RoleGroup(role, layout, pool)
    group.build(kind, *arguments).result()
    return group


def layout_of(role: RoleConfig, size: int | None = None) -> ParallelLayout:
    """Return the layout that a role configures. size: number of ranks, None = one replica"""
    tp, pp = role.tensor_model_parallel_size, role.pipeline_model_parallel_size
    cp = role.context_parallel_size
    return ParallelLayout(size or tp * cp * pp, tp, pp, cp)


def build_policy(
    config: RunConfig, pool: Any, eos_token_ids: Sequence[int]
) -> tuple[ActorGroup, RolloutGroup]:
    """Build actor and rollout on one pool and send the weights, so that rollout can generate."""
    actor, rollout = ActorGroup(config, pool), RolloutGroup(config, pool)
    for build in (actor.build(), rollout.build(eos_token_ids)):
        build.result()
    rollout.update_weights(actor, 0)
    return actor, rollout


def split_evenly(rollouts: Rollouts, replicas: int) -> Sharded:
    """Split rollouts into contiguous parts of equal size, one for each replica."""
    each = rollouts.num_rows // replicas
    return Sharded([rollouts.select(range(n * each, (n + 1) * each)) for n in range(replicas)])


def update(
    group: RoleGroup, method: Callable[..., Any], rollouts: Rollouts, experience: Experience,
    *more: Any,
) -> UpdateReport:  # fmt: skip
    """Do one optimizer step on all eight samples, spread over the replicas; return its report.

    method: `update_policy` or `update_critic` of the role. more: further arguments of it
    """
    shares = rank_steps([list(range(8))], 8, group.layout.dp)
    pending = group.call(
        method,
        Sharded([rollouts.select(share.rows) for share in shares]),
        Sharded([experience.select(share.rows) for share in shares]),
        Sharded([share.steps for share in shares]),
        *more,
    )
    report: UpdateReport = pending.result()[0]
    return report
