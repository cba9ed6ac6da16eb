"""A worker sets up its device before anything of Megatron is imported."""

from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_rlxf import device
from mindspeed_rlxf.cluster import local
from mindspeed_rlxf.cluster.errors import Origin, WorkerError
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.problems import UserError


class Stop(Exception):
    pass


@pytest.fixture
def setups(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `device.setup` was called with; it ends the start."""
    calls: list[Any] = []

    def setup(*args: Any, **kwargs: Any) -> None:
        calls.append((args, kwargs))
        raise Stop

    monkeypatch.setattr(device, "setup", setup)
    return calls


@pytest.mark.parametrize(
    ("kind", "ids", "assigned"),
    [
        (DeviceKind.NPU, {"NPU": ["5"], "GPU": []}, "5"),
        (DeviceKind.CUDA, {"NPU": [], "GPU": ["2"]}, "2"),
        (DeviceKind.CPU, {}, None),
    ],
)
def test_a_worker_hands_on_its_device_and_deadline(setups, monkeypatch, kind, ids, assigned):
    from mindspeed_rlxf.cluster.ray import pool as ray_pool

    context = SimpleNamespace(get_accelerator_ids=lambda: ids)
    monkeypatch.setattr(ray_pool.ray, "get_runtime_context", lambda: context)
    origin = Origin("main", 0, "here", "start")
    where = ("127.0.0.1", 1, {})
    with pytest.raises(WorkerError, match=r"main rank 0 on .* failed in start: Stop"):
        ray_pool.RayWorker().join(origin, "", kind, 2, [1], 1800.0, 1860.0, *where, False)
    # longer than the driver waits, whose message names the ranks
    told = {"assigned": assigned, "deadline_s": 1860.0, "megatron": False}
    assert setups == [((kind, 2), told)]


def test_a_failed_device_setup_is_a_user_error(monkeypatch):
    def setup(*_args: Any, **_kwargs: Any) -> None:
        raise ValueError("no CANN")

    monkeypatch.setattr(device, "setup", setup)
    with pytest.raises(UserError, match="no CANN"):
        local.claim_device(DeviceKind.NPU, 1, 60.0)
