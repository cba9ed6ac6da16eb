"""Create pools on a Ray cluster: reserve devices, start processes, join them into worlds."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mindspeed_rlxf import device as device_facade
from mindspeed_rlxf.cluster.diagnosis import explain_death, oom_kills
from mindspeed_rlxf.cluster.environment import worker_environment
from mindspeed_rlxf.cluster.errors import DIED, Origin, WorkerError
from mindspeed_rlxf.cluster.node_check import NodeCheck
from mindspeed_rlxf.cluster.nodes import describe_places, order_ranks
from mindspeed_rlxf.cluster.protocol import COLLECTIVE_MARGIN_S
from mindspeed_rlxf.cluster.ray.claim import DeviceClaim
from mindspeed_rlxf.cluster.ray.cluster import LOOPBACK, RayCluster, resource_name
from mindspeed_rlxf.cluster.ray.pool import RayPool, RayWorker, RayWorkers
from mindspeed_rlxf.cluster.ray.tasks import Failed, Task, device_options, run_tasks
from mindspeed_rlxf.cluster.ray.wait import RankCall, gather
from mindspeed_rlxf.cluster.worker import ProcessSetup
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.schema import DeviceConfig, PoolSettings, RuntimeConfig
from mindspeed_rlxf.config.secrets import reveal

logger = logging.getLogger(__name__)

ANSWER_S = 30.0  # of a host, which may have to start a process first


class RayPools:
    """Creates, keeps and ends all pools of a runtime."""

    def __init__(
        self,
        cluster: RayCluster,
        device: DeviceConfig,
        settings: RuntimeConfig,
        num_devices: int,
        log_dir: Path | None,
        keep_warm: bool,
        pool_settings: PoolSettings,
        node_check: NodeCheck,
    ) -> None:
        """Store the settings; nothing is reserved or started yet.

        Also looks up the kind of device that `auto` stands for, and takes the variables for the
        workers from this process's environment and from `pool_settings`.
        num_devices: devices that all pools together may use, which limits warm processes
        log_dir, keep_warm: see `RayRuntime`
        """
        self._cluster, self._threads = cluster, device.cpu_threads
        self.timeout_s = settings.timeout_s
        self.start_timeout_s = settings.start_timeout_s
        self._kind = device_facade.resolve_kind(device.kind)
        self._resource = resource_name(device)
        self.log_dir, self._keep_warm, self._num_devices = log_dir, keep_warm, num_devices
        environment = worker_environment(pool_settings.env, inherits=cluster.own)
        # Ray shows and logs what it sets itself.
        self._environment = reveal({n: v for n, v in environment.items() if v.is_open})
        self._secrets = reveal({n: v for n, v in environment.items() if not v.is_open})
        self._node_check = node_check
        logical = cluster.own and self._kind is DeviceKind.CPU
        wait_s = None if cluster.own else pool_settings.wait_s
        self.claim = DeviceClaim(cluster.address, self._resource, logical, wait_s, node_check)
        self._pools: list[RayPool] = []
        self._warm: list[RayWorkers] = []

    def create(
        self,
        processes_per_node: Mapping[str, Sequence[int]],
        parts: Mapping[str, Sequence[int]],
    ) -> dict[str, RayPool]:
        """Create all pools at the same time and wait; return them by name.

        Warm processes of an ended pool of the same shape are used again. After an error no process
        of these pools is left.

        processes_per_node: pool -> number of processes on each node
        parts:              pool -> sizes of its parts, where it is split
        Raises DevicesMissing (joined cluster) or UserError (own) where devices are missing,
        UserError where nodes differ (see `DeviceClaim.reserve`), WorkerError where a process cannot
        start, RuntimeTimeout where it does not answer.
        """
        claimed: dict[str, RayWorkers] = {}
        reserved: dict[str, Any] = {}
        try:
            for name, shape in processes_per_node.items():
                warm = next((w for w in self._warm if w.processes_per_node == tuple(shape)), None)
                if warm is not None:
                    self._warm.remove(warm)
                    claimed[name] = warm
            cold = {n: tuple(s) for n, s in processes_per_node.items() if n not in claimed}
            self._make_room(sum(sum(shape) for shape in cold.values()), claimed)
            reserved = self.claim.reserve(cold)
            claimed.update(self._start_processes(cold, reserved))
            setups = self._join_worlds({n: claimed[n] for n in processes_per_node}, parts)
        except BaseException:
            for workers in claimed.values():
                workers.kill()
            for name, group in reserved.items():
                if name not in claimed:
                    ray.util.remove_placement_group(group)
            raise
        pools = {
            name: RayPool(name, claimed[name], setups[name], self.timeout_s, self)
            for name in processes_per_node
        }
        self._pools += pools.values()
        return pools

    def end(self) -> None:
        """Kill the processes of all pools, and warm processes."""
        self._keep_warm = False
        for pool in list(self._pools):
            pool.shutdown()
        for workers in self._warm:
            workers.kill()
        self._warm.clear()

    def explain_death(self, error: WorkerError) -> WorkerError:
        """Return `error`, or a new one if the process died and its host ran out of memory."""
        places = [place for pool in self._pools for place in pool.workers.places]
        there = [place for place in places if place.host == error.host]
        if not error.cause.startswith(DIED) or not there:
            return error
        (kills,) = run_tasks([Task(there[0].node, oom_kills)], {}, ANSWER_S)
        if isinstance(kills, Failed):  # the host went away
            return error
        return explain_death(error, max(kills - place.oom_kills for place in there))

    def release(self, pool: RayPool) -> None:
        """End a pool: kill its processes, or with `keep_warm` reset them for another pool."""
        if pool not in self._pools:
            return
        self._pools.remove(pool)
        if self._keep_warm and pool.workers.reset():
            self._warm.append(pool.workers)
        else:
            pool.workers.kill()

    def _make_room(self, needed: int, claimed: Mapping[str, RayWorkers]) -> None:
        """Kill warm processes, oldest pool first, until `needed` more fit into `num_devices`."""
        in_use = [pool.workers for pool in self._pools] + list(claimed.values())
        while self._warm:
            taken = sum(len(workers.actors) for workers in in_use + self._warm)
            if taken + needed <= self._num_devices:
                return
            self._warm.pop(0).kill()

    def _start_processes(
        self, shapes: Mapping[str, tuple[int, ...]], groups: Mapping[str, Any]
    ) -> dict[str, RayWorkers]:
        """Start the processes of pools on their reserved devices and wait; return them by pool.

        Workers are in the order of ranks. On a joined cluster logs the placement, and raises
        UserError if a host does not see the run.
        groups: placement group of each pool
        """
        wants = device_options(self._resource, self._environment)
        made = ray.remote(RayWorker)
        actors: dict[str, list[tuple[int, Any]]] = {name: [] for name in shapes}
        for name, shape in shapes.items():
            for entry, count in enumerate(shape):
                where = PlacementGroupSchedulingStrategy(groups[name], entry)
                options = {"scheduling_strategy": where, "max_restarts": 0, **wants}
                for _ in range(count):
                    actors[name].append((entry, made.options(**options).remote()))
        tasks = [
            RankCall(
                Origin(name, index, "a host not known yet", "start"),
                actor.report_place.remote(entry),
            )
            for name, found in actors.items()
            for index, (entry, actor) in enumerate(found)
        ]
        places, workers = iter(gather(tasks, self.start_timeout_s)), {}
        for name, found in actors.items():
            ordered = order_ranks([(actor, next(places)) for _, actor in found])
            workers[name] = RayWorkers(shapes[name], groups[name], *ordered)
            if not self._cluster.own:
                logger.info("pool %s: %s", name, describe_places(workers[name].places))
        if not self._cluster.own:
            hosts = {place.host for w in workers.values() for place in w.places}
            self._node_check.require_shared_folder(hosts)
        return workers

    def _join_worlds(
        self, workers: Mapping[str, RayWorkers], parts: Mapping[str, Sequence[int]]
    ) -> dict[str, list[ProcessSetup]]:
        """Make each pool, or each of its parts, a torch.distributed world, and wait.

        Returns, by pool, the settings with which the ranks joined, in the order of ranks.
        """
        limit = self.start_timeout_s
        ips = {n: LOOPBACK if self._cluster.own else w.places[0].ip for n, w in workers.items()}
        opening = [
            RankCall(
                Origin(name, 0, w.places[0].host, "start"),
                w.actors[0].open_store.remote(ips[name], len(w.actors), limit),
            )
            for name, w in workers.items()
        ]
        ports = dict(zip(workers, gather(opening, limit), strict=True))
        setups = {
            name: [
                ProcessSetup(
                    pool=name,
                    rank=rank,
                    world_size=len(w.places),
                    device_kind=self._kind,
                    threads=self._threads,
                    timeout_s=self.timeout_s,
                    collective_timeout_s=max(self.timeout_s, limit) + COLLECTIVE_MARGIN_S,
                    log_dir=str(self.log_dir.absolute()) if self.log_dir is not None else None,
                    ip=LOOPBACK if self._cluster.own else place.ip,
                    parts=tuple(parts.get(name, ())),
                )
                for rank, place in enumerate(w.places)
            ]
            for name, w in workers.items()
        }
        starting = [
            RankCall(
                Origin(name, rank, w.places[rank].host, "start"),
                actor.join.remote(setups[name][rank], ips[name], ports[name], self._secrets),
            )
            for name, w in workers.items()
            for rank, actor in enumerate(w.actors)
        ]
        gather(starting, limit)
        return setups
