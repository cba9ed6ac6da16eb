"""One rank's part of an all-reduce, with real gloo in this process."""

import time

import torch.distributed as dist

from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.device import worlds
from mindspeed_rlxf.ops.doctor.all_reduce import all_reduce, arrival_key

LOOPBACK = "127.0.0.1"


def test_a_rank_alone_sums_by_itself_and_leaves_no_group() -> None:
    store, port = worlds.open_store(LOOPBACK)
    assert all_reduce(DeviceKind.CPU, LOOPBACK, port, 0, 1, 30.0) == ""
    assert store.check([arrival_key(0)])
    assert not dist.is_initialized()


def test_a_rank_that_never_comes_is_reported_at_the_deadline() -> None:
    started = time.monotonic()
    store, port = worlds.open_store(LOOPBACK)
    assert all_reduce(DeviceKind.CPU, LOOPBACK, port, 0, 2, 1.0) != ""
    assert store.check([arrival_key(0)]) and not store.check([arrival_key(1)])
    assert time.monotonic() - started < 20
    assert not dist.is_initialized()
