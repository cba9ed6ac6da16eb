"""Set up the simulated device of this process, and put faults into functions of the package."""

import importlib.util
import inspect
import os
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest

INSIDE = "RLXF_SIM_INSIDE"
collect_ignore_glob = [] if os.environ.get(INSIDE) else ["test_*.py"]
if not collect_ignore_glob:  # other test processes have no torch_npu
    assert importlib.util.find_spec("torch_npu") is not None

    from mindspeed_rlxf import device as facade
    from mindspeed_rlxf.config.enums import DeviceKind


@pytest.fixture(scope="session", autouse=True)
def claimed() -> None:
    """Set up the device as a worker does, before a test imports Megatron."""
    facade.setup(DeviceKind.NPU)


@pytest.fixture
def device(claimed: None) -> Iterator[Any]:
    """The compiled module of the device; copies are not delayed any more after the test."""
    from tests.npu_sim import build

    module = build.load()
    yield module
    module.set_delayed(False)


@pytest.fixture
def put_fault(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replace text in a function of the package: `put_fault(owner, "name", old, new)`."""

    def replace(owner: Any, name: str, old: str, new: str) -> None:
        function = getattr(owner, name)
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(old) == 1, f"{name} has {old!r} {source.count(old)} times, not once"
        scope: dict[str, Any] = {}
        code = f"from __future__ import annotations\n{source.replace(old, new)}"
        exec(code, function.__globals__, scope)  # the source of the package with a changed line
        monkeypatch.setattr(owner, name, scope[name])

    return replace
