"""The simulated HCCL checks dtypes, reductions, devices, groups and timeouts."""

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from mindspeed_rlxf.device import npu, worlds

TIMEOUT = timedelta(seconds=20)


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    worlds.join("hccl", dist.HashStore(), 0, (1,), TIMEOUT)
    yield
    worlds.leave()


def test_collectives_of_device_tensors_work():
    tensor = torch.arange(4.0, device="npu")
    dist.all_reduce(tensor)
    parts = torch.zeros(4, device="npu")
    dist.all_gather_into_tensor(parts, tensor)
    dist.broadcast(wide := torch.ones(2, dtype=torch.float64, device="npu"), src=0)
    assert parts.tolist() == [0, 1, 2, 3] and wide.tolist() == [1, 1]
    dist.all_reduce(flags := torch.tensor([True, False], device="npu"))
    assert flags.tolist() == [True, False]


def test_what_hccl_cannot_reduce_is_refused():
    group = dist.group.WORLD
    wide = torch.ones(2, dtype=torch.float64, device="npu")
    with pytest.raises(RuntimeError, match="HCCL allreduce: Unsupported data type Double"):
        group.allreduce([wide]).wait()
    with pytest.raises(RuntimeError, match="_reduce_scatter_base: Unsupported data type Double"):
        dist.reduce_scatter_tensor(torch.empty_like(wide), wide)
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        with pytest.raises(RuntimeError, match="HCCL allreduce: Unhandled ReduceOp"):
            dist.all_reduce(torch.ones(2, dtype=torch.int32, device="npu"), op=op)
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(2))
    with pytest.raises((RuntimeError, ValueError), match="contiguous"):
        dist.all_reduce(torch.ones(4, 4, device="npu")[:, 1])


def test_a_group_without_ranks_is_the_global_one(put_fault):
    """Without the list of ranks the group of a disaggregated pool is refused."""
    worlds.leave()
    put_fault(worlds, "_group_across", "ranks = list(range(size))", "ranks = []")
    with pytest.raises(RuntimeError, match="a group with an empty list of ranks"):
        worlds.join("hccl", dist.HashStore(), 0, (1, 1), TIMEOUT)


def test_timeouts_of_megatrons_groups_are_set_where_gloo_has_no_backend_of_npu(put_fault):
    groups = [dist.group.WORLD, dist.new_group(backend="gloo", timeout=timedelta(minutes=9))]
    worlds.set_timeout(groups)
    gloo = groups[1]._get_backend(torch.device("cpu"))
    assert gloo.options._timeout == timedelta(minutes=1)
    put_fault(
        worlds, "set_timeout", "kinds = {device.type for device in group._device_types}",
        "kinds = {'cuda'}",
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="No backend type associated with device type npu"):
        worlds.set_timeout(groups)


def test_hccl_waits_for_events_longer_than_for_execution(monkeypatch, put_fault):
    """A user's HCCL_EVENT_TIMEOUT limits the other; a deadline above it broke the rule before."""
    import os

    worlds.leave()
    monkeypatch.setenv(npu.EVENT, "1868")
    for name in (npu.CONNECT, npu.EXECUTE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    npu.set_timeouts(os.environ, 3660.0)
    worlds.join("hccl", dist.HashStore(), 0, (1,), TIMEOUT)
    worlds.leave()
    monkeypatch.delenv(npu.EXECUTE)
    put_fault(npu, "set_timeouts", "min(deadline, event - 1) if event else deadline", "deadline")
    npu.set_timeouts(os.environ, 3660.0)
    with pytest.raises(RuntimeError, match="HCCL_EVENT_TIMEOUT:1868 is less than or equal"):
        worlds.join("hccl", dist.HashStore(), 0, (1,), TIMEOUT)
