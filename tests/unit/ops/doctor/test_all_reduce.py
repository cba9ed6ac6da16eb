"""One rank's part of an all-reduce, with real gloo in this process."""

from __future__ import annotations

import time

import torch.distributed as dist

from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.ops.doctor.all_reduce import Meeting, Rank, all_reduce

LOOPBACK = "127.0.0.1"


def test_a_rank_alone_sums_by_itself_and_leaves_no_group() -> None:
    meeting = Meeting(LOOPBACK, 1)
    assert all_reduce(Rank(DeviceKind.CPU, LOOPBACK, meeting.port, 0, 1, 30.0)) == ""
    assert meeting.absent() == []
    assert not dist.is_initialized()


def test_a_rank_that_never_comes_is_reported_at_the_deadline() -> None:
    started = time.monotonic()
    meeting = Meeting(LOOPBACK, 2)
    assert all_reduce(Rank(DeviceKind.CPU, LOOPBACK, meeting.port, 0, 2, 1.0)) != ""
    assert meeting.absent() == [1]
    assert time.monotonic() - started < 20
    assert not dist.is_initialized()
