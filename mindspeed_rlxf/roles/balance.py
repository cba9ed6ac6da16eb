"""Divide an iteration's samples among a role's replicas so that all get equal work."""

from collections.abc import Callable
from typing import Any

import numpy as np

from mindspeed_rlxf.cluster.group import RoleFuture, RoleGroup
from mindspeed_rlxf.cluster.refs import RowsRef
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.roles import LearningConfig
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.mini_batches import (
    RankSteps,
    balanced_partitions,
    rank_steps,
    sample_flops,
)
from mindspeed_rlxf.roles.reports import ResponseLengths

Lengths = Callable[[], ResponseLengths]
"""Waits for the responses of an iteration; called only where samples are divided by length."""


def balanced_steps(
    config: RunConfig, role: Role, orders: list[list[int]], mini_batch_size: int, lengths: Lengths
) -> list[RankSteps]:
    """Return each replica's sample rows and optimizer steps (`rank_steps`).

    Every replica gets the same number of samples per mini-batch, with similar work by `lengths`.
    With `balance_by_length` off, or one replica, samples are consecutive and nothing waits for the
    lengths. `orders` has each epoch's sample order; `mini_batch_size` counts samples on all
    replicas.
    """
    replicas, together, unit = config.layout(role).dp, config.kept_together(role), 1
    if together == 1 and config.shares_in_updates(role):
        together = unit = config.shared_samples(role, mini_batch_size // replicas)
    costs = _estimate_costs(config, role, lengths, unit)
    return rank_steps(orders, mini_batch_size, replicas, costs, together)


def call_balanced(
    config: RunConfig,
    group: RoleGroup,
    method: Callable[..., Any],
    rollouts: RowsRef,
    lengths: Lengths,
    *args: Any,
) -> RoleFuture:
    """Submit a row-wise method with equal work for each replica.

    Waits for `lengths` first, unless `_estimate_costs` returns None: replicas then get equal
    contiguous shards. `RoleFuture.rows` keeps the order in `rollouts`; reports are not reordered.
    `args` are the same for all replicas.
    """
    unit = config.shared_samples(group.role, rollouts.num_rows // group.layout.dp)
    costs = _estimate_costs(config, group.role, lengths, unit)
    if costs is None:
        return group.call(method, rollouts, *args)
    units = np.reshape(np.arange(len(costs)), (-1, unit))
    partitions = balanced_partitions(np.asarray(costs)[units].sum(1), group.layout.dp)
    order = [row for indices in partitions for row in units[indices].flatten().tolist()]
    position = {row: i for i, row in enumerate(order)}
    pending = group.call(method, rollouts.take(order), *args)
    return pending.reorder([position[row] for row in range(len(order))])


def _estimate_costs(config: RunConfig, role: Role, lengths: Lengths, unit: int) -> list[int] | None:
    """Return each sample's estimated FLOPs, after waiting for the lengths.

    `unit` consecutive samples share their prompt; only the first counts it. Response logits count
    except for the critic. None, without waiting, if the role's `balance_by_length` is off (the
    actor's for untrained roles) or there is one replica.
    """
    section = config.role(role)
    learner = section if isinstance(section, LearningConfig) else config.actor_rollout
    if not learner.balance_by_length or config.layout(role).dp == 1:
        return None
    assert section.architecture is not None, "the role has a model"
    a, found, reads_logits = section.architecture, lengths(), role is not Role.CRITIC
    both = zip(found.prompts, found.responses, strict=True)
    return [
        sample_flops(a, p + r, r if reads_logits else 0)
        - (sample_flops(a, p, 0) if i % unit else 0)
        for i, (p, r) in enumerate(both)
    ]
