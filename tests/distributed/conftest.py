"""One Ray session for the tests of the cluster, and pools of forked ranks that tests share."""

from collections.abc import Iterator
from typing import Any

import pytest

from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.schema import DeviceConfig, RuntimeConfig
from tests.distributed.forked import ForkedRuntime
from tests.distributed.llamas import FSDP_POOL
from tests.forks import Forks
from tests.processes import with_sources
from tests.registries import restored_registries

NUM_DEVICES = 4  # size of the largest pool
WARM_DEVICES = 12  # of shared pools, so that most tests find one of their shape
ALL_DEVICES = WARM_DEVICES + 3  # with those of a test that makes its own


@pytest.fixture(scope="session")
def ray_runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A RayRuntime on a cluster of its own with ALL_DEVICES CPU devices; see `with_fsdp`.

    Pools that no test ends are ended with the session.
    """
    from mindspeed_rlxf.cluster.ray.runtime import RayRuntime

    config = RuntimeConfig(timeout_s=300.0, start_timeout_s=120.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "PYTHONPATH", with_sources()["PYTHONPATH"]
        )  # so that workers can import roles of tests
        patch.setenv("RAY_ADDRESS", "local")  # never join a cluster that this user runs on the host
        logs = tmp_path_factory.mktemp("logs")
        runtime = RayRuntime(
            DeviceConfig(kind=DeviceKind.CPU), config, ALL_DEVICES, log_dir=logs,
            without_megatron=[FSDP_POOL],
        )  # fmt: skip
        try:
            yield runtime
        finally:
            runtime.shutdown()


@pytest.fixture
def registries() -> Iterator[None]:
    with restored_registries():
        yield


class KeptPools:
    """A Runtime that returns an open pool when one of the same name and shape is requested again.

    A new role then replaces the one before it on running workers, without a new process group. A
    request ends the pools that were not used for longest where devices lack.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        # Name with shape, and pool; the last used at the end.
        self._kept: list[tuple[Any, Any]] = []

    def create_pools(self, processes_per_node: Any, subpool_sizes: Any = None) -> dict[str, Any]:
        """Return pools by name, as `Runtime.create_pools` does."""
        subpool_sizes, found = subpool_sizes or {}, {}
        shapes = {
            n: (n, *sizes, "split", *subpool_sizes.get(n, ()))
            for n, sizes in processes_per_node.items()
        }
        for name, shape in shapes.items():
            match = next((kept for kept in self._kept if kept[0] == shape), None)
            if match:
                self._kept.remove(match)
                self._kept.append(match)
                found[name] = match[1]
        missing = {n: sizes for n, sizes in processes_per_node.items() if n not in found}
        if missing:
            self.end_pools(WARM_DEVICES - sum(map(sum, missing.values())))
            split = {name: subpool_sizes[name] for name in missing if name in subpool_sizes}
            made = self._runtime.create_pools(missing, split)
            self._kept += [(shapes[name], pool) for name, pool in made.items()]
            found |= made
        return {name: found[name] for name in shapes}

    def end_pools(self, left: int = 0) -> None:
        """End the pools that were not used for longest, until at most `left` devices are in use.

        Tests that leave ranks dead, or waiting for each other, end all.
        """
        while sum(pool.world_size for _, pool in self._kept) > left:
            self._kept.pop(0)[1].shutdown()


@pytest.fixture(scope="session")
def kept_pools(forks: Forks) -> Iterator[KeptPools]:
    pools = KeptPools(ForkedRuntime(forks, without_megatron=[FSDP_POOL]))
    try:
        yield pools
    finally:
        pools.end_pools()


@pytest.fixture
def warm_runtime(kept_pools: KeptPools, request: pytest.FixtureRequest) -> Iterator[KeptPools]:
    """`kept_pools`, for tests that build roles or runs; all pools end when the test fails."""
    failures = request.session.testsfailed
    yield kept_pools
    if request.session.testsfailed > failures:
        kept_pools.end_pools()
