"""The Ray runtime: a cluster and its pools, from start to end."""

from __future__ import annotations

import gc
import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_rlxf.cluster.errors import Origin
from mindspeed_rlxf.cluster.interface import COLLECTIVE_MARGIN_S
from mindspeed_rlxf.cluster.nodes import describe_places, order_ranks
from mindspeed_rlxf.cluster.ray.cluster import LOOPBACK, RayCluster, open_cluster, resource_name
from mindspeed_rlxf.cluster.worker import (
    layout_environment,
    offload_environment,
    worker_environment,
)
from mindspeed_rlxf.config.enums import DeviceKind, RewardKind, Role
from mindspeed_rlxf.config.schema import DeviceConfig, PoolSettings, RunConfig, RuntimeConfig
from mindspeed_rlxf.config.secrets import Secret, reveal
from mindspeed_rlxf.device import resolve_kind

if TYPE_CHECKING:
    from mindspeed_rlxf.cluster.ray.pool import RayPool

logger = logging.getLogger(__name__)

FOUND_BY_RAY = ("GPU", "NPU")  # devices that Ray counts itself; our private cluster declares others


class RayRuntime:
    """Implements `Runtime`. Importing this module does not import Ray."""

    def __init__(
        self,
        device: DeviceConfig,
        settings: RuntimeConfig,
        num_devices: int,
        log_dir: Path | None = None,
        pool_settings: PoolSettings | None = None,
        read_by_workers: Mapping[str, str] | None = None,
        run_file: Path | None = None,
        without_megatron: Collection[str] = (),
    ) -> None:
        """Join the Ray cluster named by `settings.address`, or start a private one.

        Args:
            device: Device kind, resource and threads.
            settings: Address and deadlines.
            num_devices: Devices in the run; a private cluster declares those unknown to Ray.
            log_dir: Gets one folder per pool; None leaves worker output to Ray.
            pool_settings: Defaults to `settings.start_timeout_s` as the device wait.
            read_by_workers: Configuration keys by folder; compared on every node.
            run_file: A file in the run directory; hosts that see it share the directory.
            without_megatron: Pools whose processes must not load Megatron's adaptor.

        Raises:
            UserError: The cluster cannot be joined.
        """
        self._resource = resource_name(device)
        self._threads = device.cpu_threads
        declared: dict[str, float] = {}
        if self._resource not in FOUND_BY_RAY:
            declared[self._resource] = float(num_devices)
        self.cluster: RayCluster = open_cluster(settings.address, declared)
        # Only now: Ray reads its environment, which depends on the cluster, when it is imported.
        from mindspeed_rlxf.cluster.ray.node_tools import DeviceClaim

        pool_settings = pool_settings or PoolSettings(wait_s=settings.start_timeout_s)
        self.timeout_s = settings.timeout_s
        self.start_timeout_s = settings.start_timeout_s
        self.log_dir = log_dir
        self._without_megatron = without_megatron
        self._kind = resolve_kind(device.kind)
        environment = worker_environment(pool_settings.env, inherits=self.cluster.own)
        # Ray shows and logs what it sets itself.
        self._environment = reveal({n: v for n, v in environment.items() if v.is_open})
        self._secrets = reveal({n: v for n, v in environment.items() if not v.is_open})
        self.claim = DeviceClaim(
            self.cluster.address,
            self._resource,
            logical=self.cluster.own and self._kind is DeviceKind.CPU,
            wait_s=None if self.cluster.own else pool_settings.wait_s,
            keys=read_by_workers or {},
            run_file=run_file,
            check_s=settings.start_timeout_s,
            excludes=pool_settings.bad_nodes == "exclude",
        )
        self._pools: list[RayPool] = []

    @classmethod
    def from_config(cls, config: RunConfig, log_dir: Path, run_file: Path | None) -> RayRuntime:
        """Join or start the configured cluster; `create_pools` checks its nodes."""
        pool = config.pool_settings
        variables = offload_environment(config) | layout_environment(config)
        env = {**{name: Secret(value, value) for name, value in variables.items()}, **pool.env}
        return cls(
            config.device,
            config.runtime,
            num_devices=sum(sum(config.resource_pool[name]) for name in config.resource_pool),
            log_dir=log_dir,
            pool_settings=pool.model_copy(update={"env": env}),
            read_by_workers=folders_of_workers(config),
            run_file=run_file,
            without_megatron=[p for p in config.resource_pool if config.backend_of(p) == "fsdp"],
        )

    def create_pools(
        self,
        processes_per_node: Mapping[str, Sequence[int]],
        subpool_sizes: Mapping[str, Sequence[int]] | None = None,
    ) -> dict[str, RayPool]:
        """Create all pools at the same time and wait; return them by name.

        After an error no process in these pools is left.

        Args:
            processes_per_node: Process count on each node, by pool.
            subpool_sizes: Ranks of each sub-pool of a disaggregated pool, by pool.

        Raises:
            WorkerError: A process cannot start.
            RuntimeTimeout: A process does not answer.
            UserError: See `DeviceClaim.reserve`, whose other errors are raised too.
        """
        import ray

        shapes = {name: tuple(shape) for name, shape in processes_per_node.items()}
        groups = self.claim.reserve(shapes)
        try:
            pools = self._start_processes(shapes, groups)
            self._join_worlds(pools, subpool_sizes or {})
        except BaseException:
            for group in groups.values():
                ray.util.remove_placement_group(group)
            raise
        self._pools += pools.values()
        freeze_imports()
        return pools

    def _start_processes(
        self, shapes: Mapping[str, tuple[int, ...]], groups: Mapping[str, Any]
    ) -> dict[str, RayPool]:
        """Start pool processes on their reserved devices and wait; return the pools.

        On a joined cluster logs the placement, and raises UserError if a host does not see the run.
        """
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from mindspeed_rlxf.cluster.ray.node_tools import device_options
        from mindspeed_rlxf.cluster.ray.pool import RankCall, RayPool, RayWorker, gather

        options = {"max_restarts": 0, **device_options(self._resource, self._environment)}
        actors: dict[str, list[Any]] = {}
        starts = []
        for name, shape in shapes.items():
            actors[name] = []
            for entry, count in enumerate(shape):
                strategy = PlacementGroupSchedulingStrategy(groups[name], entry)
                worker = ray.remote(RayWorker).options(scheduling_strategy=strategy, **options)
                for _ in range(count):
                    origin = Origin(name, len(actors[name]), "a host not known yet", "start")
                    actor = worker.remote()
                    actors[name].append(actor)
                    starts.append(RankCall(origin, actor.report_place.remote(entry)))
        places = iter(gather(starts, self.start_timeout_s))
        pools = {}
        for name, pool_actors in actors.items():
            ordered = order_ranks([(actor, next(places)) for actor in pool_actors])
            pools[name] = RayPool(name, *ordered, groups[name], self.log_dir, self.timeout_s)
            if not self.cluster.own:
                logger.info("pool %s: %s", name, describe_places(pools[name].places))
        if not self.cluster.own:
            hosts = {place.host for pool in pools.values() for place in pool.places}
            self.claim.require_shared_folder(hosts)
        return pools

    def _join_worlds(
        self, pools: Mapping[str, RayPool], subpool_sizes: Mapping[str, Sequence[int]]
    ) -> None:
        """Make each pool, or each sub-pool, a torch.distributed world, and wait."""
        from mindspeed_rlxf.cluster.ray.pool import RankCall, gather

        limit_s = self.start_timeout_s
        store_ips = {}
        opening = []
        for name, pool in pools.items():
            store_ips[name] = LOOPBACK if self.cluster.own else pool.places[0].ip
            store = pool.actors[0].open_store.remote(store_ips[name], pool.world_size, limit_s)
            opening.append(RankCall(pool.origin(0, name, "start"), store))
        ports = gather(opening, limit_s)
        joining = []
        for (name, pool), port in zip(pools.items(), ports, strict=True):
            for rank, actor in enumerate(pool.actors):
                origin = pool.origin(rank, name, "start")
                reply = actor.join.remote(
                    origin,
                    ip=LOOPBACK if self.cluster.own else pool.places[rank].ip,
                    kind=self._kind,
                    threads=self._threads,
                    subpool_sizes=subpool_sizes.get(name) or [pool.world_size],
                    timeout_s=self.timeout_s,
                    deadline_s=max(self.timeout_s, limit_s) + COLLECTIVE_MARGIN_S,
                    store_ip=store_ips[name],
                    store_port=port,
                    secrets=self._secrets,
                    megatron=name not in self._without_megatron,
                )
                joining.append(RankCall(origin, reply))
        gather(joining, limit_s)

    def shutdown(self) -> None:
        """Kill all pool processes and leave the cluster, which ends if it is private."""
        try:
            for pool in self._pools:
                pool.shutdown()
        finally:
            self.cluster.close()


def freeze_imports() -> None:
    """Exempt all present objects, chiefly modules, from slow garbage collection."""
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()


def folders_of_workers(config: RunConfig) -> dict[str, str]:
    """Return {folder read by workers: its configuration keys, joined by ", "}."""
    keys: dict[str, list[str]] = {}
    for role in config.roles:
        if role is Role.REWARD and config.reward.kind is RewardKind.RULE:
            continue
        keys.setdefault(str(config.role(role).load), []).append(f"{role.value}.load")
    tokenizer = config.training.tokenizer_name_or_path
    keys.setdefault(tokenizer, []).append("training.tokenizer_name_or_path")
    return {folder: ", ".join(names) for folder, names in keys.items()}
