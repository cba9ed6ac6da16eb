"""The process's device, and functions of the package with one line taken back."""

from __future__ import annotations

import importlib.util
import inspect
import os
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest

INSIDE = "RLXF_SIM_INSIDE"
collect_ignore_glob = [] if os.environ.get(INSIDE) else ["test_*.py"]
if not collect_ignore_glob:  # an ordinary test process has no torch_npu
    assert importlib.util.find_spec("torch_npu") is not None

    from mindspeed_rlxf import device as facade
    from mindspeed_rlxf.config.enums import DeviceKind


@pytest.fixture(scope="session", autouse=True)
def claimed() -> None:
    """Set up the device as a worker does, before a test imports Megatron."""
    facade.setup(DeviceKind.NPU)


@pytest.fixture
def device(claimed: None) -> Iterator[Any]:
    """The compiled module; copies end at once again after the test."""
    from tests.npu_sim import build

    module = build.load()
    yield module
    module.set_delayed(False)


@pytest.fixture
def take_back(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replace text in a function of the package: `take_back(owner, "name", old, new)`."""

    def replace(owner: Any, name: str, old: str, new: str) -> None:
        function = getattr(owner, name)
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(old) == 1, f"{name} has {source.count(old)} times {old!r}"
        scope: dict[str, Any] = {}
        code = f"from __future__ import annotations\n{source.replace(old, new)}"
        exec(code, function.__globals__, scope)  # its own source, with a line of the test
        monkeypatch.setattr(owner, name, scope[name])

    return replace
