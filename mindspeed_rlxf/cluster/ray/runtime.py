"""The runtime on Ray: a cluster and the pools on it, from start to end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mindspeed_rlxf.cluster.environment import offload_environment
from mindspeed_rlxf.cluster.protocol import Pool
from mindspeed_rlxf.cluster.ray.cluster import RayCluster, open_cluster, resource_name
from mindspeed_rlxf.config.enums import RewardKind, Role
from mindspeed_rlxf.config.schema import DeviceConfig, PoolSettings, RunConfig, RuntimeConfig
from mindspeed_rlxf.config.secrets import Secret
from mindspeed_rlxf.device import resolve_kind

FOUND_BY_RAY = ("GPU", "NPU")  # devices that Ray counts itself; our own cluster declares others


class RayRuntime:
    """Implements `protocol.Runtime`. Importing this module does not import Ray."""

    def __init__(
        self,
        device: DeviceConfig,
        settings: RuntimeConfig,
        num_devices: int,
        log_dir: Path | None = None,
        keep_warm: bool = False,
        pool_settings: PoolSettings | None = None,
        read_by_workers: Mapping[str, str] | None = None,
        run_file: Path | None = None,
    ) -> None:
        """Join the Ray cluster that `settings.address` names, or start our own.

        num_devices: devices of the run; our own cluster declares as many of a kind unknown to Ray
        log_dir: gets one folder per pool; None leaves the output of workers to Ray
        keep_warm: keep the processes of ended pools for later pools of the same shape (tests)
        pool_settings: None = the defaults, with the wait of `settings.start_timeout_s`
        read_by_workers: folder -> the configuration keys that name it; compared on every node
        run_file: a file of the run directory; hosts that see it share the directory
        Raises UserError where the cluster cannot or must not be joined.
        """
        resource = resource_name(device)
        declared = {} if resource in FOUND_BY_RAY else {resource: float(num_devices)}
        self.cluster: RayCluster = open_cluster(settings.address, declared)
        # Only now: Ray reads its environment, which depends on the cluster, when it is imported.
        from mindspeed_rlxf.cluster.node_check import NodeCheck
        from mindspeed_rlxf.cluster.ray.pools import RayPools
        from mindspeed_rlxf.cluster.ray.tasks import ask_nodes

        pool_settings = pool_settings or PoolSettings(wait_s=settings.start_timeout_s)
        probe = resolve_kind(device.kind) if pool_settings.bad_nodes == "leave_out" else None
        wait_s = settings.start_timeout_s
        check = NodeCheck(ask_nodes, read_by_workers or {}, run_file, wait_s, probe)
        arguments = (self.cluster, device, settings, num_devices, log_dir, keep_warm)
        self.pools = RayPools(*arguments, pool_settings, check)
        self.explain_death = self.pools.explain_death

    @classmethod
    def from_config(cls, config: RunConfig, log_dir: Path, run_file: Path | None) -> RayRuntime:
        """Join or start the cluster of the configuration; `create_pools` checks its nodes."""
        pool = config.pool_settings
        offloading = {n: Secret(v, v) for n, v in offload_environment(config).items()}
        env = {**offloading, **pool.env}
        return cls(
            config.device,
            config.runtime,
            num_devices=sum(config.pool_size(name) for name in config.resource_pool),
            log_dir=log_dir,
            pool_settings=pool.model_copy(update={"env": env}),
            read_by_workers=folders_of_workers(config),
            run_file=run_file,
        )

    def create_pools(
        self,
        processes_per_node: Mapping[str, Sequence[int]],
        parts: Mapping[str, Sequence[int]] | None = None,
    ) -> dict[str, Pool]:
        """Create all pools at the same time and wait; see `RayPools.create`."""
        from mindspeed_rlxf.cluster.worker import freeze_imports

        pools: dict[str, Pool] = dict(self.pools.create(processes_per_node, parts or {}))
        freeze_imports()
        return pools

    def shutdown(self) -> None:
        """Kill all processes of the pools, then leave the cluster, even if killing fails.

        If the cluster is our own, it ends.
        """
        try:
            self.pools.end()
        finally:
            self.cluster.close()


def folders_of_workers(config: RunConfig) -> dict[str, str]:
    """Return {folder that workers read: the configuration keys that name it, joined by ", "}."""
    keys: dict[str, list[str]] = {}
    for role in config.roles:
        if role is Role.REWARD and config.reward.kind is RewardKind.RULE:
            continue
        keys.setdefault(str(config.role(role).load), []).append(f"{role.value}.load")
    tokenizer = config.training.tokenizer_name_or_path
    keys.setdefault(tokenizer, []).append("training.tokenizer_name_or_path")
    return {folder: ", ".join(names) for folder, names in keys.items()}
