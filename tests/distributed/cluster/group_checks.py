"""Checks of role groups that every runtime has to pass: Ray's and the local one."""

from __future__ import annotations

import time

import pytest
import torch

from mindspeed_rlxf.cluster.errors import HostError, WorkerError
from mindspeed_rlxf.cluster.group import RoleGroup, Sharded
from mindspeed_rlxf.cluster.host_agent import call_each
from mindspeed_rlxf.cluster.protocol import Pool
from mindspeed_rlxf.cluster.refs import RowsRef
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.layout import ParallelLayout
from tests.distributed.cluster.stand_ins import Numbers, StandIn, Unbuildable


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
    rows = make_rows(actor, 1).take([0])
    parts = [Numbers(torch.tensor([1]))] * pool.world_size
    assert critic.call(StandIn.make, Sharded(parts)).rows().num_rows == pool.world_size
    inputs = (rows, "name", {"more": rows})
    report = critic.call(StandIn.read_both, inputs).result()[0]
    assert report == ["name", [100], [100]]


def check_failures(pool: Pool) -> None:
    """An error of all ranks, of one rank, and of a build is reported, and the pool stays usable.

    None of these errors leaves a rank waiting for another.
    """
    group = build(pool)
    with pytest.raises(WorkerError, match=r"actor_rollout\.leak must report plain Python") as leak:
        group.call(StandIn.leak).result()
    assert leak.value.phase == "leak" and leak.value.role == "actor_rollout"
    last = pool.world_size - 1
    with pytest.raises(WorkerError) as alone:
        group.call(StandIn.fail_alone, last).result()
    assert (alone.value.rank, alone.value.cause) == (last, "ValueError: only here")
    with pytest.raises(WorkerError) as unbuilt:
        RoleGroup(Role.REF, ParallelLayout(pool.world_size), pool).build(Unbuildable).result()
    assert unbuilt.value.cause == "ValueError: no such model"
    assert (unbuilt.value.role, unbuilt.value.phase) == ("ref", "build")
    assert len(group.call(StandIn.rank).result()) == pool.world_size


BIG = 50_000_000  # bytes


def check_host_agents(pool: Pool) -> None:
    """A host agent returns results, reports failures, keeps deadlines, and passes the result of
    one call on as an argument of another."""
    assert len(pool.hosts) == pool.world_size
    (agent,) = set(pool.hosts)
    assert call_each([agent, agent], sorted, [2, 1], timeout_s=60.0) == [[1, 2]] * 2
    data = agent.start(bytes, BIG, timeout_s=60.0)
    assert agent.call(len, data, timeout_s=60.0) == BIG == len(data.result())
    with pytest.raises(HostError, match=rf"^int on {agent.host} failed: ValueError: ") as raised:
        agent.call(int, "seven", timeout_s=60.0)
    assert raised.value.phase == "int" and not raised.value.is_late
    assert "ValueError: invalid literal" in raised.value.remote_traceback
    lost = agent.start(int, "seven", timeout_s=60.0)
    with pytest.raises(HostError, match=r"^int on .* failed: ValueError: "):
        agent.call(abs, lost, timeout_s=60.0)
    started = time.monotonic()
    message = rf"^sleep on {agent.host} failed: no reply within 0\.5 s, waiting for the function to"
    with pytest.raises(HostError, match=message) as late:
        agent.call(time.sleep, 30.0, timeout_s=0.5)
    assert late.value.is_late and 0.4 < time.monotonic() - started < 25
    assert agent.call(abs, -1, timeout_s=10.0) == 1, "a hanging function must not block the next"
