"""One Ray session for all distributed tests."""

from __future__ import annotations

import os
from collections.abc import Iterator, Set
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


class KeptPools:
    """A Runtime that gives the same pools for the same request: a role is built in a world that is
    there already, in the place of the one before. Another request takes over processes of pools
    that have its shapes."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._kept: dict[str, dict[str, Any]] = {}

    def create_pools(self, processes_per_node: Any, parts: Any = None) -> dict[str, Any]:
        request = f"{dict(processes_per_node)} {parts or {}}"
        if request not in self._kept:
            shapes = {tuple(shape) for shape in processes_per_node.values()}
            self.end_pools(shapes)
            held = sum(pool.world_size for pools in self._kept.values() for pool in pools.values())
            if held + sum(map(sum, processes_per_node.values())) > WARM_DEVICES:
                self.end_pools()
            self._kept[request] = self._runtime.create_pools(processes_per_node, parts)
        return self._kept[request]

    def end_pools(self, shapes: Set[tuple[int, ...]] | None = None) -> None:
        """End the requests with a pool of these shapes, or all: for tests that leave ranks dead, or
        waiting for each other."""
        for request, pools in list(self._kept.items()):
            if shapes is None or shapes & {p.workers.processes_per_node for p in pools.values()}:
                for pool in self._kept.pop(request).values():
                    pool.shutdown()


@pytest.fixture(scope="session")
def kept_pools(ray_runtime: Any) -> KeptPools:
    return KeptPools(ray_runtime)


@pytest.fixture
def warm_runtime(kept_pools: KeptPools, request: pytest.FixtureRequest) -> Iterator[KeptPools]:
    """For tests that build one role, or one run, after another. A failure ends the pools."""
    failures = request.session.testsfailed
    yield kept_pools
    if request.session.testsfailed > failures:
        kept_pools.end_pools()
