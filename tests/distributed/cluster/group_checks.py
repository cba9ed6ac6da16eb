"""Checks of role groups that every runtime has to pass: Ray's and the local one."""

import pytest
import torch

from mindspeed_rlxf.cluster.errors import WorkerError
from mindspeed_rlxf.cluster.group import RoleGroup, Sharded
from mindspeed_rlxf.cluster.interface import Pool
from mindspeed_rlxf.cluster.refs import RowsRef
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.rank_layout import ParallelLayout
from tests.distributed.cluster.stand_ins import Inputs, Numbers, StandIn, Unbuildable


def build(pool: Pool, role: Role = Role.ACTOR_ROLLOUT, tp: int = 1, offset: int = 0) -> RoleGroup:
    """Build a StandIn on every rank of the pool. offset: what the StandIn adds to its rows"""
    group = RoleGroup(role, ParallelLayout(pool.world_size, tp), pool)
    group.build(StandIn, offset).result()
    return group


def make_rows(group: RoleGroup, per_replica: int) -> RowsRef:
    """Let each replica of the group make `per_replica` rows; return all rows 0, 1, 2, ..."""
    parts = [torch.arange(per_replica) + i * per_replica for i in range(group.layout.dp)]
    return group.call(StandIn.make, Sharded([Numbers(part) for part in parts])).rows()


def check_ranks_and_leaders(pool: Pool) -> None:
    size = pool.world_size
    assert build(pool).call(StandIn.rank).result() == [(rank, size) for rank in range(size)]
    one_replica = build(pool, tp=size)
    assert one_replica.call(StandIn.rank).result() == [(0, size)]
    assert one_replica.call(StandIn.rank).seconds < 10


def check_rows_between_layouts(producer_pool: Pool, consumer_pool: Pool) -> None:
    """Rows of a producer with one replica per rank arrive in order at consumers of two layouts:
    one replica of all ranks, and one replica per rank."""
    producer = build(producer_pool)
    rows = make_rows(producer, 6)
    count = 6 * producer.layout.dp
    assert rows.num_rows == count
    whole = build(consumer_pool, Role.CRITIC, tp=consumer_pool.world_size)
    backwards = list(reversed(range(count)))
    report = whole.call(StandIn.read, rows.take(backwards)).result()
    assert [fetched.numbers for fetched in report] == [backwards]
    spread = build(consumer_pool, Role.REF)
    reports = spread.call(StandIn.read, rows.take(backwards)).result()
    assert [n for fetched in reports for n in fetched.numbers] == backwards
    assert reports[0].total == sum(range(count))


def check_two_roles_in_one_process(pool: Pool) -> None:
    actor, critic = build(pool, offset=100), build(pool, Role.CRITIC, offset=7)
    rows = make_rows(actor, 1)
    parts = [Numbers(torch.tensor([1]))] * pool.world_size
    assert critic.call(StandIn.make, Sharded(parts)).rows().num_rows == pool.world_size
    inputs = Inputs(rows, "name")
    assert critic.call(StandIn.read_both, inputs, rows).result()[0] == ["name", [100], [100]]


def check_failures(pool: Pool) -> None:
    """An error of all ranks, of one rank, and of a build is reported, and the pool stays usable.

    None of these errors leaves a rank waiting for another.
    """
    group = build(pool)
    last = pool.world_size - 1
    with pytest.raises(WorkerError) as alone:
        group.call(StandIn.fail_alone, last).result()
    assert (alone.value.rank, alone.value.cause) == (last, "ValueError: only here")
    with pytest.raises(WorkerError) as unbuilt:
        RoleGroup(Role.REF, ParallelLayout(pool.world_size), pool).build(Unbuildable).result()
    assert unbuilt.value.cause == "ValueError: no such model"
    assert (unbuilt.value.role, unbuilt.value.phase) == ("ref", "build")
    assert len(group.call(StandIn.rank).result()) == pool.world_size
