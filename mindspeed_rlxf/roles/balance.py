"""Divide the samples of an iteration among the replicas of a role, so that all have equal work."""

from collections.abc import Callable
from typing import Any

import numpy as np

from mindspeed_rlxf.cluster.group import Pending, RoleGroup
from mindspeed_rlxf.cluster.refs import RowsRef
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.roles import LearningConfig
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.mini_batches import RankSteps, equal_parts, rank_steps, sample_flops
from mindspeed_rlxf.roles.reports import ResponseLengths

Lengths = Callable[[], ResponseLengths]
"""Waits for the responses of an iteration; called only where samples are divided by length."""


def balanced_steps(
    config: RunConfig, role: Role, orders: list[list[int]], mini_batch_size: int, lengths: Lengths
) -> list[RankSteps]:
    """Return, for each replica, the rows of its samples and their optimizer steps (`rank_steps`).

    Replicas get equally many samples of each mini-batch, of nearly equal work, for which `lengths`
    is waited for; with `balance_by_length` off, or one replica, consecutive ones without waiting.
    orders:          the order of the samples in each epoch
    mini_batch_size: samples of all replicas in one optimizer step
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
) -> Pending:
    """Submit a method that computes each row by itself, with equal work for each replica.

    Waits for `lengths` first, unless `_estimate_costs` returns None: replicas then get equal
    contiguous parts. `Pending.rows` has the order of `rollouts`; reports are not reordered.
    args: further arguments, the same for all
    """
    unit = config.shared_samples(group.role, rollouts.num_rows // group.layout.dp)
    costs = _estimate_costs(config, group.role, lengths, unit)
    if costs is None:
        return group.call(method, rollouts, *args)
    units = np.reshape(np.arange(len(costs)), (-1, unit))
    parts = equal_parts(np.asarray(costs)[units].sum(1), group.layout.dp)
    order = [row for part in parts for row in units[part].flatten().tolist()]
    position = {row: i for i, row in enumerate(order)}
    pending = group.call(method, rollouts.take(order), *args)
    return pending.reorder([position[row] for row in range(len(order))])


def _estimate_costs(config: RunConfig, role: Role, lengths: Lengths, unit: int) -> list[int] | None:
    """Return the estimated floating-point operations of each sample; waits for the lengths.

    unit: number of consecutive samples that share their prompt, which counts for the first alone
    Logits of the responses count except for the critic. None, without waiting, where the role's
    `balance_by_length` is off (the actor's for roles that do not learn), or there is one replica:
    replicas then get consecutive samples.
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
