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
from mindspeed_rlxf.cluster.errors import DIED, HostError, Origin, WorkerError
from mindspeed_rlxf.cluster.node_check import NodeCheck
from mindspeed_rlxf.cluster.nodes import describe_places, order_ranks
from mindspeed_rlxf.cluster.protocol import COLLECTIVE_MARGIN_S
from mindspeed_rlxf.cluster.ray.agent import RayAgent, RayAgents, device_options
from mindspeed_rlxf.cluster.ray.claim import DeviceClaim
from mindspeed_rlxf.cluster.ray.cluster import LOOPBACK, RayCluster, resource_name
from mindspeed_rlxf.cluster.ray.pool import RayPool, RayWorkers, start_worker
from mindspeed_rlxf.cluster.ray.wait import gather
from mindspeed_rlxf.cluster.worker import ProcessSetup
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.schema import DeviceConfig, PoolSettings, RuntimeConfig
from mindspeed_rlxf.config.secrets import reveal
from mindspeed_rlxf.files.safe import PRIVATE, mode_within

logger = logging.getLogger(__name__)

ANSWER_S = 30.0  # of a host, whose agent may have to start first


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
        agents: RayAgents,
    ) -> None:
        """Store the settings; nothing is reserved or started yet.

        Also looks up the kind of device that `auto` stands for, and takes the variables for the
        workers from this process's environment and from `pool_settings`.
        num_devices: devices that all pools together may use, which limits warm processes
        log_dir, keep_warm: see `RayRuntime`
        """
        self._agents = agents
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

        Warm processes of an ended pool of the same shape are used again. Agents of nodes without a
        pool are ended. After an error no process of these pools is left.

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
            name: RayPool(
                name,
                claimed[name],
                setups[name],
                self._agents_of(claimed[name]),
                self.timeout_s,
                self,
            )
            for name in processes_per_node
        }
        self._pools += pools.values()
        self._agents.end(but=[agent for pool in self._pools for agent in pool.hosts])
        return pools

    def _agents_of(self, workers: RayWorkers) -> list[RayAgent]:
        """Return the agent of each rank's host, in the order of ranks."""
        return [self._agents.on(place.node, place.host) for place in workers.places]

    def end(self) -> None:
        """Kill the processes of all pools, warm processes and agents."""
        self._keep_warm = False
        for pool in list(self._pools):
            pool.shutdown()
        for workers in self._warm:
            workers.kill()
        self._warm.clear()
        self._agents.end()

    def explain_death(self, error: WorkerError) -> WorkerError:
        """Return `error`, or a new one that says its host ran out of memory.

        It did if the process died and the kernel has killed processes of the host since the workers
        started.
        """
        places = [place for pool in self._pools for place in pool.workers.places]
        there = [place for place in places if place.host == error.host]
        if not error.cause.startswith(DIED) or not there:
            return error
        agent = self._agents.on(there[0].node, error.host)
        try:
            kills = agent.call(oom_kills, timeout_s=ANSWER_S)
        except HostError:  # the host went away
            return error
        return explain_death(error, max(kills - place.oom_kills for place in there))

    def release(self, pool: RayPool) -> None:
        """End a pool: kill its processes, or with `keep_warm` reset them for another pool.

        Waits for the reset; if one process cannot be reset, all are killed. Does nothing for a pool
        that has ended.
        """
        if pool not in self._pools:
            return
        self._pools.remove(pool)
        if self._keep_warm and pool.workers.reset():
            self._warm.append(pool.workers)
        else:
            pool.workers.kill()

    def _make_room(self, needed: int, claimed: Mapping[str, RayWorkers]) -> None:
        """Kill warm processes, oldest pool first, until `needed` more fit into `num_devices`.

        All pools, warm processes and `claimed` count. Stops when no warm processes are left.
        needed:  number of new processes
        claimed: workers of the pools that are being created
        """
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

        Each pool's workers are in the order of ranks. Also starts the agents of their hosts. On a
        joined cluster the placement is logged. Raises UserError if a host does not see the run.
        groups: placement group of each pool
        """
        actors = {name: self._start_actors(shape, groups[name]) for name, shape in shapes.items()}
        tasks = [
            (actor.report_place.remote(entry), Origin(name, index, "a host not known yet", "start"))
            for name, found in actors.items()
            for index, (entry, actor) in enumerate(found)
        ]
        places, workers = iter(gather(tasks, self.start_timeout_s)), {}
        for name, found in actors.items():
            ordered = order_ranks([(actor, next(places)) for _, actor in found])
            workers[name] = RayWorkers(shapes[name], groups[name], *ordered)
            for agent in self._agents_of(workers[name]):
                agent.open()  # starts while the ranks import what they need
            if not self._cluster.own:
                logger.info("pool %s: %s", name, describe_places(workers[name].places))
        if not self._cluster.own:
            hosts = {place.host for w in workers.values() for place in w.places}
            self._node_check.require_shared_folder(hosts)
        return workers

    def _start_actors(self, shape: tuple[int, ...], group: Any) -> list[tuple[int, Any]]:
        """Start an actor for each process of a shape, without waiting.

        Returns (index of its entry in `shape`, actor) for each, in the order of entries.
        group: placement group, with a bundle for each entry
        """
        wants = device_options(self._resource, self._environment)
        found = []
        for bundle, count in enumerate(shape):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
            options = {"scheduling_strategy": strategy, **wants}
            found += [(bundle, start_worker(options)) for _ in range(count)]
        return found

    def _join_worlds(
        self, workers: Mapping[str, RayWorkers], parts: Mapping[str, Sequence[int]]
    ) -> dict[str, list[ProcessSetup]]:
        """Make each pool, or each of its parts, a torch.distributed world, and wait.

        Returns, by pool, the settings with which the ranks joined, in the order of ranks.
        """
        limit = self.start_timeout_s
        ips = {n: LOOPBACK if self._cluster.own else w.places[0].ip for n, w in workers.items()}
        opening = [
            (
                w.actors[0].open_store.remote(ips[name], len(w.actors), limit),
                Origin(name, 0, w.places[0].host, "start"),
            )
            for name, w in workers.items()
        ]
        ports = dict(zip(workers, gather(opening, limit), strict=True))
        setups = {
            name: self._make_setups(name, w, tuple(parts.get(name, ())))
            for name, w in workers.items()
        }
        starting = [
            (
                actor.join.remote(setups[name][rank], ips[name], ports[name], self._secrets),
                Origin(name, rank, w.places[rank].host, "start"),
            )
            for name, w in workers.items()
            for rank, actor in enumerate(w.actors)
        ]
        gather(starting, limit)
        return setups

    def _make_setups(
        self, name: str, workers: RayWorkers, parts: tuple[int, ...]
    ) -> list[ProcessSetup]:
        """Return the settings with which each rank joins its pool's world, in the order of ranks.

        parts: number of ranks of each part; () = the pool is not split
        """
        return [
            ProcessSetup(
                pool=name,
                rank=rank,
                world_size=len(workers.places),
                device_kind=self._kind,
                threads=self._threads,
                timeout_s=self.timeout_s,
                collective_timeout_s=max(self.timeout_s, self.start_timeout_s)
                + COLLECTIVE_MARGIN_S,
                log_dir=str(self.log_dir.absolute()) if self.log_dir is not None else None,
                ip=LOOPBACK if self._cluster.own else place.ip,
                log_mode=mode_within(self.log_dir) if self.log_dir is not None else PRIVATE,
                parts=parts,
            )
            for rank, place in enumerate(workers.places)
        ]
