"""The runtime on Ray: a cluster and the pools on it, from start to end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mindspeed_rlxf.config.schema import DeviceConfig, RunConfig, RuntimeConfig
from mindspeed_rlxf.runtime.protocol import Pool
from mindspeed_rlxf.runtime.ray_cluster import RayCluster, open_cluster, resource_name

FOUND_BY_RAY = ("GPU", "NPU")  # resources that Ray counts itself; others an own cluster declares


class RayRuntime:
    """Implements `protocol.Runtime`. Importing this module does not import Ray."""

    def __init__(
        self,
        device: DeviceConfig,
        settings: RuntimeConfig,
        num_devices: int,
        log_dir: Path | None = None,
        keep_warm: bool = False,
    ) -> None:
        """Join a cluster, or start our own.

        num_devices: logical devices that an own cluster declares
        log_dir: gets one folder per pool; None leaves the output of workers to Ray
        keep_warm: processes of ended pools wait for a pool of the same shape (tests)
        """
        resource = resource_name(device)
        declared = {} if resource in FOUND_BY_RAY else {resource: float(num_devices)}
        self.cluster: RayCluster = open_cluster(settings.address, declared)
        # Only now: Ray reads its environment, which depends on the cluster, when it is imported.
        from mindspeed_rlxf.runtime.ray_pools import RayPools

        self.pools = RayPools(self.cluster, device, settings, num_devices, log_dir, keep_warm)

    @classmethod
    def from_config(cls, config: RunConfig, log_dir: Path | None) -> RayRuntime:
        num_devices = sum(config.pool_size(name) for name in config.resource_pool)
        return cls(config.device, config.runtime, num_devices, log_dir)

    def create_pools(
        self,
        processes_per_node: Mapping[str, Sequence[int]],
        parts: Mapping[str, Sequence[int]] | None = None,
    ) -> dict[str, Pool]:
        """Pools by name, started at the same time.

        Raises DevicesMissing (joined cluster) or UserError (own) when the devices are not there,
        WorkerError when a process does not come up, RuntimeTimeout when it does not come back.
        """
        return dict(self.pools.create(processes_per_node, parts or {}))

    def shutdown(self) -> None:
        """End all pools, and an own cluster with everything in it."""
        try:
            self.pools.end()
        finally:
            self.cluster.close()
