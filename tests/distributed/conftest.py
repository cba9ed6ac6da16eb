"""One Ray session for all distributed tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.schema import DeviceConfig, RuntimeConfig

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_DEVICES = 4  # of the largest pool
WARM_DEVICES = 10  # pools of 4, 2 and 1, four of them, keep their processes beside each other


@pytest.fixture(scope="session")
def ray_runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A RayRuntime on its own cluster, CPU devices for all pool sizes; deadlines 300 s, then 30 s.

    A pool that a test ends keeps its processes: the next pool of the same shape takes them over,
    with all their imports done. Pools that a test leaves open end with the session.
    """
    from mindspeed_rlxf.cluster.ray.runtime import RayRuntime

    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "RAY_ADDRESS")}
    os.environ["PYTHONPATH"] = str(REPOSITORY)  # where workers find the roles that tests define
    os.environ["RAY_ADDRESS"] = "local"  # whatever else this user runs here
    runtime = RayRuntime(
        DeviceConfig(kind=DeviceKind.CPU),
        RuntimeConfig(timeout_s=300.0, start_timeout_s=120.0),
        WARM_DEVICES,
        log_dir=tmp_path_factory.mktemp("logs"),
        keep_warm=True,
    )
    try:
        yield runtime
    finally:
        runtime.shutdown()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class OnePoolSetAtATime:
    """A Runtime whose new pools take over the processes of those before."""

    def __init__(self, runtime: Any) -> None:
        self._runtime, self._pools = runtime, {}

    def create_pools(self, processes_per_node: Any, parts: Any = None) -> dict[str, Any]:
        self.end_pools()
        self._pools = self._runtime.create_pools(processes_per_node, parts)
        return self._pools

    def end_pools(self) -> None:
        for pool in self._pools.values():
            pool.shutdown()
        self._pools = {}


@pytest.fixture
def warm_runtime(ray_runtime: Any) -> Iterator[OnePoolSetAtATime]:
    """For tests that build one set of pools after another."""
    runtime = OnePoolSetAtATime(ray_runtime)
    yield runtime
    runtime.end_pools()
