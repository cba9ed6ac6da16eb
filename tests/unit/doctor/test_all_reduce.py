"""One rank's part, with real gloo in this process: nobody comes late, or somebody never."""

from __future__ import annotations

import time

import torch.distributed as dist

from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.doctor.all_reduce import Task, all_reduce, open_store
from mindspeed_rlxf.doctor.hunt import Outcome
from mindspeed_rlxf.doctor.ranks import _together
from mindspeed_rlxf.runtime.errors import WorkerError
from mindspeed_rlxf.runtime.ray_survey import LateReply

LOOPBACK = "127.0.0.1"


def task(port: int, world_size: int, timeout_s: float) -> Task:
    return Task(DeviceKind.CPU, LOOPBACK, port, 0, world_size, timeout_s)


def test_a_rank_alone_sums_by_itself_and_leaves_no_group() -> None:
    outcome = all_reduce(task(open_store(LOOPBACK), 1, 30.0))
    assert outcome.passed and 0 < outcome.seconds < 30
    assert not dist.is_initialized()


def test_who_never_comes_is_told_at_the_deadline() -> None:
    started = time.monotonic()
    outcome = all_reduce(task(open_store(LOOPBACK), 2, 1.0))
    assert not outcome.passed and outcome.absent == (1,) and outcome.said
    assert time.monotonic() - started < 20
    assert not dist.is_initialized()


def test_the_slowest_rank_counts_and_dead_processes_are_named_before_those_that_wait() -> None:
    good, slow = Outcome(True, 0.1), Outcome(True, 0.3)
    assert _together((4, 5), {4: good, 5: slow}) == Outcome(True, 0.3)
    waited = Outcome(False, 0.0, (1,), "timed out")  # rank 1 of the group is process 5
    dead = WorkerError("doctor", 0, "h", "all_reduce", "the process died")
    assert _together((4, 5), {4: waited, 5: dead}) == Outcome(False, 0.0, (5,), "the process died")
    late = LateReply("no reply within 5 s")
    assert _together((4, 5), {4: waited, 5: late}) == Outcome(False, 0.0, (5,), "timed out")
