"""One rank's part of an all-reduce, with real gloo in this process."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from mindspeed_rlxf.cluster.errors import HostError
from mindspeed_rlxf.cluster.host_agent import Function, HostCall
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.ops.doctor.all_reduce import Task, all_reduce, open_store
from mindspeed_rlxf.ops.doctor.hunt import Outcome
from mindspeed_rlxf.ops.doctor.ranks import RayRanks, _merge_replies
from tests.unit.cluster.agents import InProcess

LOOPBACK = "127.0.0.1"


class StandIn(InProcess):
    """A process of the survey: works, hangs until it is replaced, or hangs for ever."""

    def __init__(self, way: str) -> None:
        super().__init__("h")
        self.way, self.num_replaced = way, 0

    def start(self, function: Function, *args: Any, timeout_s: float) -> HostCall:
        return super().start(self.answer, function, timeout_s=timeout_s)

    def answer(self, function: Function) -> Outcome | int:
        if self.way != "works":
            raise TimeoutError("no reply within 5 s")
        return Outcome(True) if function is all_reduce else 1

    def end(self) -> None:
        self.num_replaced += 1
        if self.way == "hangs once":
            self.way = "works"


def ranks(*ways: str) -> Any:
    return RayRanks(DeviceKind.CPU, [StandIn(way) for way in ways], [LOOPBACK] * len(ways))  # type: ignore[misc]


def test_a_process_that_hangs_is_replaced_and_works_in_the_next_round() -> None:
    made = ranks("works", "hangs once", "works", "works")
    first = made.run([(0, 1), (2, 3)], 15.0)
    assert [o.passed for o in first] == [False, True]
    assert [o.passed for o in made.run([(0, 1), (2, 3)], 15.0)] == [True, True]


def test_a_process_that_does_not_start_again_fails_at_once_from_then_on() -> None:
    made = ranks("works", "hangs", "works", "works")
    made.run([(0, 1), (2, 3)], 15.0)
    pair, other = made.run([(1, 2), (0, 3)], 15.0)
    assert (pair.passed, pair.absent, other.passed) == (False, (1,), True)
    assert made.processes[1].num_replaced == 1  # type: ignore[attr-defined]


def task(port: int, world_size: int, timeout_s: float) -> Task:
    return Task(DeviceKind.CPU, LOOPBACK, port, 0, world_size, timeout_s)


def test_a_rank_alone_sums_by_itself_and_leaves_no_group() -> None:
    outcome = all_reduce(task(open_store(LOOPBACK), 1, 30.0))
    assert outcome == Outcome(True)
    assert not dist.is_initialized()


def test_a_rank_that_never_comes_is_reported_at_the_deadline() -> None:
    started = time.monotonic()
    outcome = all_reduce(task(open_store(LOOPBACK), 2, 1.0))
    assert not outcome.passed and outcome.absent == (1,) and outcome.cause
    assert time.monotonic() - started < 20
    assert not dist.is_initialized()


def test_dead_processes_are_named_before_those_that_wait_for_them() -> None:
    assert _merge_replies((4, 5), {4: Outcome(True), 5: Outcome(True)}) == Outcome(True)
    waited = Outcome(False, (1,), "timed out")  # rank 1 of the group is process 5
    dead = HostError("h", "all_reduce", "the process died")
    assert _merge_replies((4, 5), {4: waited, 5: dead}) == Outcome(False, (5,), "the process died")
    late = HostError("h", "all_reduce", "no reply within 5 s", is_late=True)
    assert _merge_replies((4, 5), {4: waited, 5: late}) == Outcome(False, (5,), "timed out")
