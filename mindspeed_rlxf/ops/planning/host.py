"""Compute the host memory and the disk that a run needs."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from mindspeed_rlxf.config import memory
from mindspeed_rlxf.config.enums import Role, RuntimeKind
from mindspeed_rlxf.config.rules.host import PROCESS_BYTES
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.models.sizes import HEADS, model_numbers
from mindspeed_rlxf.ops.planning.available import is_joined, on_cpu
from mindspeed_rlxf.ops.planning.memory import PoolMemory, has_model
from mindspeed_rlxf.weights.hf_folder import HfFolder


def _trained_roles(config: RunConfig) -> list[Role]:
    return [role for role in (Role.ACTOR_ROLLOUT, Role.CRITIC) if role in config.roles]


@dataclass(frozen=True)
class HostMemory:
    """Bytes on the host with most processes, if it also has the driver and all rows.

    devices:     memory of the roles if the device is a CPU, else 0
    rows:        samples of an iteration that the ranks keep
    exports:     copies of the final weights of each role while they are written
    checkpoints: copies of the state of each role while it is written
    copies:      offloaded state of each role, during the whole run
    page_cache:  loaded weight files, which the system can drop; in no sum
    """

    num_processes: int
    processes: int
    devices: int  # bytes of the roles if the device is a CPU
    rows: int
    driver: int
    exports: dict[Role, int]
    checkpoints: dict[Role, int]
    copies: dict[Role, int]
    page_cache: int

    @property
    def export(self) -> int:
        return sum(self.exports.values())

    @property
    def checkpoint(self) -> int:
        return sum(self.checkpoints.values())

    @property
    def offloaded(self) -> int:
        return sum(self.copies.values())

    @property
    def phases(self) -> dict[str, int]:
        """Return name -> bytes of the phases load, iteration, checkpoint and final weights.

        Rows count in iteration and checkpoint only: they are freed before the final weights are
        written.
        """
        lasting = self.processes + self.driver + self.devices + self.offloaded
        return {
            "load": lasting,
            "iteration": lasting + self.rows,
            "checkpoint": lasting + self.rows + self.checkpoint,
            "final weights": lasting + self.export,
        }

    @property
    def total(self) -> int:
        """Return the bytes of the phase that needs most."""
        return max(self.phases.values())


@dataclass(frozen=True)
class Disk:
    """Bytes in the run directory: final weights of each role, and checkpoints.

    checkpoint: bytes of one; num_checkpoints: those kept, plus the one being written
    """

    exports: dict[Role, int]
    checkpoint: int
    num_checkpoints: int

    @property
    def total(self) -> int:
        return sum(self.exports.values()) + self.num_checkpoints * self.checkpoint


def host_memory_needed(config: RunConfig, pools: list[PoolMemory]) -> HostMemory:
    """Return the bytes that each consumer takes of the memory of the host with most processes.

    On our own cluster the processes of all pools are on one host and are added up; otherwise those
    of the largest pool count. Memory of devices and copies is added up for all pools.
    pools: memory of the pools' devices; it counts as host memory on CPU
    """
    actor, samples = config.actor_rollout, config.samples_per_iteration
    nodes = {need.pool: config.resource_pool[need.pool] for need in pools}
    sizes = [_processes_on_one_host(config, processes) for processes in nodes.values()]
    shared = config.runtime.kind is RuntimeKind.LOCAL or is_joined(config)
    count = max(sizes) if shared else sum(sizes)
    devices = [need.total * _processes_on_one_host(config, need.processes) for need in pools]
    row = memory.sample_bytes(actor.max_prompt_length, actor.max_new_tokens)
    return HostMemory(
        num_processes=count,
        processes=count * PROCESS_BYTES,
        devices=sum(devices) if on_cpu(config) else 0,
        rows=memory.store_bytes(_num_responses(config), row),
        driver=memory.driver_bytes(PROCESS_BYTES, samples, actor.max_prompt_length),
        exports={r: _export_bytes_on_one_host(config, r) for r in _trained_roles(config)},
        checkpoints={r: _checkpoint_bytes_on_one_host(config, r) for r in _trained_roles(config)},
        copies=_copies_on_one_host(config, pools),
        page_cache=_bytes_loaded(config),
    )


def _copies_on_one_host(config: RunConfig, pools: list[PoolMemory]) -> dict[Role, int]:
    """Return role -> bytes of its offloaded state on the host with most of its processes.

    Roles that offload nothing are left out.
    """
    found: dict[Role, int] = {}
    for pool in pools:
        count = _processes_on_one_host(config, pool.processes)
        for role in pool.roles:
            if role.copies:
                found[role.role] = found.get(role.role, 0) + role.copies * count
    return found


def _bytes_loaded(config: RunConfig) -> int:
    """Return the bytes of the weights that all roles load, in the data type of their folders.

    They are computed from the numbers of parameters. A folder that several roles load counts once.
    """
    folders: dict[str | None, int] = {}
    for role in config.roles:
        section = config.role(role)
        if has_model(config, role):
            stored = stored_itemsize(section.load, memory.itemsize(section))
            folders[section.load] = memory.weight_bytes(_numbers(config, role), stored)
    return sum(folders.values())


def _checkpoint_bytes_on_one_host(config: RunConfig, role: Role) -> int:
    """Return the bytes of a role's checkpoint that the host with most of its ranks writes.

    A checkpoint has weights and optimizer; all ranks of the role write equal parts.
    """
    whole = memory.checkpoint_bytes(_numbers(config, role), memory.itemsize(config.role(role)))
    ranks = config.processes_of(role)
    return whole * _processes_on_one_host(config, ranks) // sum(ranks)


def _num_responses(config: RunConfig) -> int:
    """Return the most responses of an iteration, also those that are not trained on.

    With `filter_groups` it is `max_num_gen_batches` times the samples. An estimator that needs
    greedy responses adds `global_batch_size` once: they are made for the prompts that are kept.
    """
    algorithm, samples = config.algorithm, config.samples_per_iteration
    batches = algorithm.max_num_gen_batches if algorithm.filter_groups else 1
    greedy = algorithm.estimator.reads_greedy
    return batches * samples + (config.training.global_batch_size if greedy else 0)


def disk_needed(config: RunConfig) -> Disk:
    """Return the disk space for final weights and checkpoints of the trained roles.

    A checkpoint has all trained roles; one more than `training.keep_last` is counted.
    """
    itemsizes = {role: memory.itemsize(config.role(role)) for role in _trained_roles(config)}
    checkpoints = [memory.checkpoint_bytes(_numbers(config, r), i) for r, i in itemsizes.items()]
    exports = {role: _export_bytes(config, role) for role in itemsizes}
    return Disk(exports, sum(checkpoints), config.training.keep_last + 1)


def _processes_on_one_host(config: RunConfig, processes: Sequence[int]) -> int:
    """Return the most processes on one host: of a joined cluster's largest node, else all."""
    return max(processes) if is_joined(config) else sum(processes)


def _numbers(config: RunConfig, role: Role) -> int:
    """Return the number of parameters of a role's whole model."""
    return model_numbers(config.role(role).architecture, HEADS[role])


def _export_bytes_on_one_host(config: RunConfig, role: Role) -> int:
    """Return the bytes of final weights that are written on the host with most writers.

    The writers are the first rank of each pipeline stage and, with experts, of each group of
    experts in it; all write the same number of bytes. Without a joined cluster there is one host.
    """
    section, layout = config.role(role), config.layout(role)
    ep = section.expert_model_parallel_size
    numbers = _numbers(config, role) // (layout.pp * ep)
    share = memory.weight_bytes(numbers, memory.itemsize(section))
    sizes = config.resource_pool[config.pool_of(role)]
    ends = list(accumulate(sizes if is_joined(config) else [sum(sizes)]))
    writers = [
        layout.tp * (layout.dp * pp_rank + ep_rank)
        for pp_rank in range(layout.pp)
        for ep_rank in range(ep)
    ]
    hosts = Counter(bisect_right(ends, rank) for rank in writers)
    return share * max(hosts.values())


def _export_bytes(config: RunConfig, role: Role) -> int:
    """Return the bytes of a role's final weights on disk, in Megatron and Hugging Face format."""
    itemsize = memory.itemsize(config.role(role))
    stored = stored_itemsize(config.role(role).load, itemsize)
    return memory.export_bytes(_numbers(config, role), itemsize, stored)


def stored_itemsize(folder: str | None, otherwise: int) -> int:
    """Return the bytes of one weight in a Hugging Face folder, read from the final norm.

    otherwise: returned if there is no folder, it cannot be read or lacks the norm; other checks
               report that
    """
    try:
        return HfFolder(str(folder)).dtype("model.norm.weight").itemsize
    except (KeyError, ValueError):
        return otherwise
