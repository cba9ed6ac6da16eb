"""Role groups split arguments over ranks and join what the ranks return."""

from collections.abc import Sequence
from typing import Any

import pytest

from mindspeed_rlxf.cluster.group import RoleGroup, Sharded
from mindspeed_rlxf.cluster.interface import Reply, Request, SubPool
from mindspeed_rlxf.cluster.refs import RankRows, RowsRef
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.rank_layout import ParallelLayout
from mindspeed_rlxf.data.batch import RoleOutput


class RecordingCall:
    def __init__(self, requests: Sequence[Request]) -> None:
        self.handles = [f"rank {rank}" for rank in range(len(requests))]
        self.waits = 0
        self.reports: list[Any] = [f"report {rank}" for rank in range(len(requests))]

    def wait(self) -> list[Reply]:
        self.waits += 1
        return [Reply(report, 10 + i, float(i)) for i, report in enumerate(self.reports)]


class RecordingPool:
    """Keeps what is submitted; rank r reports `report r`, 10 + r rows and r seconds."""

    name = "recording"

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.requests: list[Request] = []
        self.first_rank = 0
        self.calls: list[RecordingCall] = []

    def submit(self, requests: Sequence[Request], first_rank: int = 0) -> RecordingCall:
        self.requests, self.first_rank = list(requests), first_rank
        self.calls.append(RecordingCall(requests))
        return self.calls[-1]

    def shutdown(self) -> None: ...


class SomeRole:
    def work(self, *args: Any) -> RoleOutput:
        raise AssertionError("never runs in the driver")


def make_group(world_size: int, tp: int, pp: int) -> tuple[RoleGroup, RecordingPool]:
    pool = RecordingPool(world_size)
    return RoleGroup(Role.CRITIC, ParallelLayout(world_size, tp, pp), pool), pool


def ref(*sizes: int) -> RowsRef:
    return RowsRef(tuple(RankRows(f"piece {i}", size) for i, size in enumerate(sizes)))


def test_rows_are_split_by_data_parallel_rank_and_the_rest_is_the_same_for_all() -> None:
    # TP 2, DP 2, PP 2: rank = tp + 2 * (dp + 2 * pp), so ranks 0 1 4 5 are replica 0.
    group, pool = make_group(8, tp=2, pp=2)
    group.call(SomeRole.work, ref(4, 2), Sharded(["left", "right"]), "all")
    replica_0, replica_1 = ref(4, 2).split(2)
    for rank in (0, 1, 4, 5):
        assert pool.requests[rank].args == (replica_0, "left", "all")
    for rank in (2, 3, 6, 7):
        assert pool.requests[rank].args == (replica_1, "right", "all")
    assert {request.method for request in pool.requests} == {"work"}


def test_only_leaders_keep_rows_and_reports_come_in_data_parallel_order() -> None:
    group, pool = make_group(8, tp=2, pp=2)  # leaders: tp 0, pp 1 -> ranks 4 and 6
    pending = group.call(SomeRole.work, ref(4, 2))
    kept = [rank for rank, request in enumerate(pool.requests) if request.is_leader]
    assert kept == [4, 6]
    assert pending.result() == ["report 4", "report 6"]
    assert pending.seconds == 7.0  # the slowest of all ranks, leader or not


def test_a_call_waits_once_for_the_number_of_rows_where_the_inputs_do_not_give_it() -> None:
    group, pool = make_group(2, tp=1, pp=1)
    rows = group.call(SomeRole.work, ref(4, 2)).rows()
    assert rows == RowsRef((RankRows("rank 0", 3), RankRows("rank 1", 3)))
    assert pool.calls[0].waits == 0
    assert [request.num_rows for request in pool.requests] == [3, 3]
    pending = group.call(SomeRole.work, 5)
    assert [piece.num_rows for piece in pending.rows().pieces] == [10, 11]
    pending.result()
    assert pool.calls[1].waits == 1


def test_a_part_of_a_pool_is_a_pool_whose_ranks_count_from_its_first() -> None:
    pool = RecordingPool(5)
    part = SubPool(pool, 3, 2)
    group = RoleGroup(Role.CRITIC, ParallelLayout(2), part)
    found = group.call(SomeRole.work, Sharded(["left", "right"]))
    assert pool.first_rank == 3 and [r.args for r in pool.requests] == [("left",), ("right",)]
    assert found.result() == ["report 0", "report 1"]
    SubPool(part, 1, 1).submit([])
    assert pool.first_rank == 4
    with pytest.raises(AssertionError, match="recording has 5 ranks, not 3 \\+ 3"):
        SubPool(pool, 3, 3)
