"""Parts leave the device and come back into the same tensors; on a CPU, by the same code."""

import pytest
import torch
from torch import Tensor

from mindspeed_rlxf import device
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.engine import offload
from mindspeed_rlxf.engine.offload import Offload
from mindspeed_rlxf.engine.train_engine import MemoryKind

W, G, O = MemoryKind.WEIGHTS, MemoryKind.GRADIENTS, MemoryKind.OPTIMIZER  # noqa: E741


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_active", DeviceKind.CPU)  # its setup rewrites torch for good
    monkeypatch.setattr(offload, "CHUNK_BYTES", 1024)  # storages below lie across chunks
    monkeypatch.setattr(offload, "_known", type(offload._known)())


class Model:
    """Weights of which two view one buffer, a buffer of gradients, and moments made later."""

    def __init__(self, seed: int = 0, movable: tuple[MemoryKind, ...] = tuple(MemoryKind)) -> None:
        generator = torch.Generator().manual_seed(seed)
        buffer = torch.randn(700, generator=generator)
        self.buffer = buffer
        self.weights = [
            torch.nn.Parameter(buffer[:300].view(30, 10)),
            torch.nn.Parameter(buffer[300:].view(40, 10)),
            torch.nn.Parameter(torch.randn(5, 7, generator=generator).bfloat16()),
        ]
        self.gradients = torch.ones(700)
        self.view = self.gradients[300:].view(40, 10)
        self.moments: list[Tensor] = []
        tensors = {W: lambda: self.weights, G: lambda: [self.gradients], O: lambda: self.moments}
        self.offload = Offload(tensors, movable)
        offload.register(self.offload)

    def held(self) -> list[int]:
        """Bytes of weights, gradients and moments on the device."""
        parts = (self.weights, [self.gradients], self.moments)
        return [sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in part}
                    .values()) for part in parts]  # fmt: skip


WHOLE = [2800 + 70, 2800, 0]


def test_views_are_valid_again_and_hold_the_same_numbers() -> None:
    model = Model()
    before = [weight.detach().clone() for weight in model.weights]
    shared = model.weights[0].data  # as a rollout has it
    model.offload.offload(MemoryKind)
    assert model.held() == [0, 0, 0]
    model.offload.onload(MemoryKind)
    assert model.held() == WHOLE
    assert all(map(torch.equal, before, model.weights))
    assert torch.equal(shared, before[0]) and torch.equal(model.buffer[:300], before[0].view(-1))
    model.weights[0].data.zero_()
    assert not shared.any() and not model.buffer[:300].any()


def test_gradients_come_back_as_zeros() -> None:
    model = Model()
    model.offload.offload([G])
    assert model.held() == [WHOLE[0], 0, 0]
    model.offload.onload([G])
    assert model.view.numel() == 400 and not model.gradients.any()


def test_moments_that_the_optimizer_makes_later_leave_too() -> None:
    model = Model()
    model.offload.offload([O])
    model.offload.onload([O])
    model.moments += [torch.full((333,), 2.0), torch.full((8,), 3.0)]
    model.offload.offload([O])
    assert model.held()[2] == 0
    model.offload.onload([O])
    assert (model.moments[0] == 2).all() and (model.moments[1] == 3).all()


def test_a_part_that_did_not_change_is_not_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    model.offload.offload([W])
    model.offload.onload([W])
    copies: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "copy_", lambda *_, **__: copies.append(1))
        model.offload.offload([W])
        assert model.held()[0] == 0 and not copies
    model.offload.onload([W])
    model.weights[2].data.fill_(7.0)
    model.offload.mark_changed(W)
    model.offload.offload([W])
    model.offload.onload([W])
    assert (model.weights[2] == 7).all()


def test_numbers_are_read_from_where_they_are() -> None:
    model = Model()
    expected = model.weights[1].detach().view(-1)[13:390].clone()
    for _ in range(2):
        found = model.offload.read(model.weights[1].detach(), 13, 390)
        assert found.tolist() == expected.tolist()  # no assertion may show a tensor that is away
        model.offload.offload([W])
    assert model.held()[0] == 0


def test_host_memory_is_allocated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    buffer = offload.host_buffer
    monkeypatch.setattr(offload, "host_buffer", lambda n: made.append(n) or buffer(n))
    model = Model()
    model.moments.append(torch.ones(100))
    for _ in range(5):
        model.offload.offload(MemoryKind)
        model.offload.onload(MemoryKind)
        model.offload.mark_changed(*MemoryKind)
    # 2,800 and 70 bytes to multiples of 512 are 3,584, 400 are 512
    assert sorted(made) == [512, 512, 1024, 1024, 1024] and max(made) <= 1024


def test_parts_leave_the_device_for_another_engine_unless_they_are_in_use() -> None:
    one, two = Model(1), Model(2)
    with offload.holding((one.offload, [W])):
        assert one.held() == [WHOLE[0], 0, 0] and two.held() == [0, 0, 0]
        with offload.holding((two.offload, [W, G])):
            assert one.held()[0] and two.held() == WHOLE
    assert one.held()[0] and two.held()[0]  # nobody else needed the device
    with offload.holding((two.offload, MemoryKind)):
        assert one.held() == [0, 0, 0]
    assert two.held() == WHOLE
    with offload.holding():
        assert two.held() == [0, 0, 0]


def test_other_processes_get_the_memory_that_parts_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    model, held_at_release = Model(1), list[list[int]]()
    monkeypatch.setattr(device, "release_cache", lambda: held_at_release.append(model.held()))
    with offload.room_for_other_processes():
        assert held_at_release == [[0, 0, 0]]


def test_an_engine_keeps_what_it_may_not_move() -> None:
    one, two = Model(1, (O, G)), Model(2, ())
    with offload.holding((one.offload, [W])):
        assert one.held() == [WHOLE[0], 0, 0] and two.held() == WHOLE
    with offload.holding((two.offload, [W])):
        assert one.held() == [WHOLE[0], 0, 0]


def test_a_failing_phase_holds_nothing() -> None:
    one, two = Model(1), Model(2)
    with pytest.raises(ValueError, match="middle"), offload.holding((one.offload, MemoryKind)):
        raise ValueError("middle")
    assert not offload._holds
    with offload.holding((two.offload, MemoryKind)):
        assert one.held() == [0, 0, 0]
    assert one.weights[0].shape == (30, 10)
