"""The simulated device: memory, copies, streams, and the calls that it refuses."""

import pytest
import torch
import torch.nn.functional as F

MIB = 1024**2


def test_host_and_device_tensors_do_not_mix():
    on_device, index = torch.arange(6.0, device="npu"), torch.tensor([0, 2])
    with pytest.raises(RuntimeError, match="index got tensors of the host and of npu:0"):
        on_device[index]
    with pytest.raises(RuntimeError, match="all tensors to be on the same device"):
        on_device + torch.ones(6)
    assert (on_device + torch.tensor(1.0)).sum().item() == 21.0  # a number is no mix


def test_a_device_tensor_has_no_numpy_array():
    with pytest.raises(TypeError, match="can't convert npu:0 device type tensor to numpy"):
        torch.ones(3, device="npu").numpy()


def test_devices_are_apart_and_count_their_own_memory(device):
    before = [device.memory(i)[0] for i in range(2)]
    tensor = torch.zeros(MIB, device="npu:1")
    assert [device.memory(i)[0] - before[i] for i in range(2)] == [0, 4 * MIB]
    with pytest.raises(RuntimeError, match=r"npu:1 and npu:0|npu:0 and npu:1"):
        tensor + torch.zeros(MIB, device="npu:0")
    doubled = tensor * 2  # results of operators count too
    assert device.memory(1)[0] - before[1] == 8 * MIB and doubled.device.index == 1
    del tensor, doubled
    assert device.memory(1)[0] == before[1]


def test_memory_ends_at_the_limit_with_torch_npus_words(device):
    devices, limit = device.device_count(), device.memory(0)[2]
    device.set_devices(devices, device.memory(0)[0] + MIB)
    try:
        with pytest.raises(RuntimeError, match=r"NPU out of memory\. Tried to allocate 4\.00 MiB"):
            torch.empty(MIB, device="npu")
        half = torch.zeros(MIB // 8, device="npu")
        with pytest.raises(RuntimeError, match="NPU out of memory"):
            torch.cat([half, half])
    finally:
        device.set_devices(devices, limit)
    assert torch.empty(MIB, device="npu").numel() == MIB


def test_a_cast_by_dtype_alone_to_fp64_gives_fp32():
    tensor = torch.ones(3, device="npu")
    assert tensor.double().dtype is tensor.to(torch.float64).dtype is torch.float32
    assert tensor.cpu().double().dtype is torch.float64


def test_operators_refuse_what_the_vendors_table_lacks():
    wide = torch.zeros(4, dtype=torch.float64, device="npu")
    with pytest.raises(RuntimeError, match=r"sort does not support Double \(torch\.sort in Ascend"):
        wide.sort()
    with pytest.raises(RuntimeError, match="sum does not support the argument dtype"):
        torch.ones(4, dtype=torch.int32, device="npu").sum(dtype=torch.int64)
    assert wide.cumsum(0).dtype is torch.float64


def test_a_mask_has_a_row_for_each_query_before_cann_9_1(monkeypatch):
    query, key = torch.ones(2, 3, 4, 8, device="npu"), torch.ones(2, 3, 5, 8, device="npu")
    one_row = torch.ones(2, 1, 1, 5, dtype=torch.bool, device="npu")
    with pytest.raises(RuntimeError, match=r"get unsupported atten_mask shape.*\(2, 1, 1, 5\)"):
        F.scaled_dot_product_attention(query, key, key, one_row)
    F.scaled_dot_product_attention(query, key, key, one_row.expand(-1, -1, 4, -1))
    monkeypatch.setenv("RLXF_SIM_CANN", "9.1")
    F.scaled_dot_product_attention(query, key, key, one_row)


def test_a_copy_to_the_host_ends_when_its_stream_is_waited_for(device):
    device.set_delayed(True)
    on_device = torch.arange(3.0, device="npu")
    floats = on_device.to("cpu", non_blocking=True)
    numbers = on_device.long().to("cpu", non_blocking=True)
    on_device.zero_()  # comes after the copies
    assert floats.isnan().all() and (numbers == -91).all() and device.pending_copies() == 2
    torch.npu.current_stream().synchronize()
    assert floats.tolist() == numbers.tolist() == [0, 1, 2] and device.pending_copies() == 0


def test_a_copy_to_the_device_reads_the_host_when_it_runs(device):
    device.set_delayed(True)
    host = torch.ones(3)
    copied = host.to("npu", non_blocking=True)
    host.fill_(7.0)  # too early: nobody has waited
    assert (copied + 0).cpu().tolist() == [7.0] * 3


def test_an_event_ends_the_copies_before_it(device):
    device.set_delayed(True)
    tensor, event = torch.ones(2, device="npu"), torch.npu.Event()
    first = tensor.to("cpu", non_blocking=True)
    event.record()
    second = tensor.to("cpu", non_blocking=True)
    assert not event.query()
    event.synchronize()
    assert event.query() and first.tolist() == [1, 1] and second.isnan().all()


def test_another_stream_has_to_wait_for_a_copy(device):
    device.set_delayed(True)
    side, event = torch.npu.Stream(), torch.npu.Event()
    with torch.npu.stream(side):
        copied = torch.ones(2).to("npu", non_blocking=True)
        event.record(side)
    assert (copied + 1).cpu().isnan().all()
    torch.npu.current_stream().wait_event(event)
    assert (copied + 1).cpu().tolist() == [2, 2]


def test_each_device_has_a_random_stream_of_its_own():
    torch.manual_seed(5)
    host = torch.randn(3)
    state = torch.npu.get_rng_state()
    drawn = torch.randn(3, device="npu").cpu()
    after = torch.randn(3)  # the host's stream went on by its own draws alone
    torch.npu.set_rng_state(state)
    assert torch.equal(torch.randn(3, device="npu").cpu(), drawn)
    generator = torch.Generator().manual_seed(5)
    for mine in (host, after):
        assert torch.equal(mine, torch.randn(3, generator=generator))
