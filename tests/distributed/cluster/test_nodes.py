"""Pools over several Ray nodes of one machine; the driver's node has none of the devices.

The nodes join the cluster of the session and declare the resource `lab`; runs on them are made as
on a cluster that was joined.
"""

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.cluster.errors import DevicesMissing
from mindspeed_rlxf.cluster.ray import runtime
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.schema import DeviceConfig, PoolSettings, RuntimeConfig
from tests.distributed.cluster.group_checks import build
from tests.distributed.cluster.stand_ins import StandIn

pytestmark = pytest.mark.long  # `unit/cluster/ray/test_devices.py` has the report
JOIN_S = 60.0
# `ray start` takes 127.0.0.1 for the host's other address, where the session's cluster is not.
RAY_ON_LOOPBACK = """
from ray._private import services
services.resolve_ip_for_localhost = str
from ray.scripts.scripts import main
main()
"""


def ray_nodes() -> list[str]:
    """Ids of the live ones."""
    import ray  # the session's cluster sets its environment first

    return [node["NodeID"] for node in ray.nodes() if node["Alive"]]


def wait_until_free(devices: int) -> None:
    """Wait until no run has devices: Ray may take seconds to return those of a run that ended."""
    import ray

    deadline = time.monotonic() + JOIN_S
    while (found := ray.available_resources().get("lab")) != devices:
        assert time.monotonic() < deadline, f"{found} of {devices} devices are free"
        time.sleep(0.1)


class Nodes:
    """Ray nodes that are started here and end with the test module."""

    def __init__(self, address: str, log: Path) -> None:
        self._address, self._log = address, log
        self._started: list[subprocess.Popen[bytes]] = []
        self._first = len(ray_nodes())

    def add(self, **resources: int) -> None:
        """Returns at once: the node joins when it is up.

        One after the other: Ray nodes that start on one host at once may choose the same port.
        """
        deadline = time.monotonic() + JOIN_S / 2
        while len(ray_nodes()) < self._first + len(self._started) and time.monotonic() < deadline:
            time.sleep(0.1)
        environment = {**os.environ, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
        del environment["RAY_ADDRESS"]
        command = [
            sys.executable, "-c", RAY_ON_LOOPBACK, "start", "--block",
            f"--address={self._address}", "--node-ip-address=127.0.0.1", "--num-cpus=1",
            f"--resources={json.dumps(resources)}", "--object-store-memory=80000000",
        ]  # fmt: skip
        with open(self._log, "ab") as log:
            self._started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))

    def end(self) -> None:
        for node in self._started:
            node.terminate()
        for node in self._started:
            try:
                node.wait(timeout=20)
            except subprocess.TimeoutExpired:
                node.kill()
                node.wait()


@pytest.fixture(scope="module")
def nodes(ray_runtime: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Two nodes: with two devices, and with one."""
    found = Nodes(ray_runtime.cluster.address, tmp_path_factory.mktemp("nodes") / "ray.log")
    try:
        found.add(lab=2)
        found.add(lab=1)
        wait_until_free(3)
        yield found
    finally:
        found.end()


@pytest.fixture
def make_pools(
    ray_runtime: Any, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    """Pools of one more run on the cluster, as if it had joined."""
    made: list[Any] = []
    joined = dataclasses.replace(ray_runtime.cluster, own=False)
    monkeypatch.setattr(runtime, "open_cluster", lambda *_: joined)

    def make(
        wait_s: float, shapes: dict[str, list[int]], exclude: Set[str] = frozenset(),
        **environment: str,
    ) -> Any:  # fmt: skip
        run = runtime.RayRuntime(
            DeviceConfig(kind=DeviceKind.CPU, resource_name="lab"),
            RuntimeConfig(timeout_s=60.0, start_timeout_s=120.0),
            num_devices=0,
            pool_settings=PoolSettings(wait_s=wait_s, env=environment),
        )
        run.claim.excluded |= exclude
        pools = run.create_pools(shapes)
        made.extend(pools.values())
        return pools

    yield make
    for pool in made:
        pool.shutdown()


def test_nodes_that_lack_devices_are_named_and_nothing_is_held(make_pools):
    wait_until_free(3)
    with pytest.raises(DevicesMissing) as missing:
        make_pools(1.0, {"small": [2], "big": [3]})
    missing.match(r"resource_pool\.big needs lab: 3 on one node; .*\): 2 of 2 free")
    assert "resource_pool.small" not in str(missing.value)


def test_a_late_node_is_waited_for_and_ranks_follow_the_list(make_pools, nodes):
    nodes.add(lab=2)
    large = make_pools(JOIN_S, {"main": [2, 2]})["main"]
    assert build(large).call(StandIn.rank).result() == [(rank, 4) for rank in range(4)]
    large.shutdown()
    other = make_pools(JOIN_S, {"main": [2]}, exclude={large.places[0].node})["main"]
    assert {place.node for place in other.places} == {large.places[-1].node}
    other.shutdown()
    pools = make_pools(JOIN_S, {"one": [1], "main": [2, 1]})
    assert build(pools["main"]).call(StandIn.rank).result() == [(0, 3), (1, 3), (2, 3)]
    assert [place.entry for place in pools["main"].places] == [0, 0, 1]
