"""Compute the host memory and disk space for a run."""

import contextlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.host_rules import PROCESS_BYTES
from mindspeed_rlxf.config.rank_layout import count_per_node
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.models.parameter_counts import (
    HEADS,
    adapter_sizes,
    model_elements,
    split_sizes,
)
from mindspeed_rlxf.models.parameters import Head
from mindspeed_rlxf.ops.planning.available import is_joined, on_cpu
from mindspeed_rlxf.ops.planning.memory import PoolMemory, has_model
from mindspeed_rlxf.ops.planning.stage_memory import itemsize, optimizer_itemsize
from mindspeed_rlxf.weights.hf_folder import open_hf_folder

USUAL_GEN_BATCHES = 10
"""Batches of an iteration with algorithm.filter_groups, where their number has no limit."""
PHASES = ("load", "iteration", "checkpoint", "final weights")


@dataclass(frozen=True)
class Consumer:
    """One consumer's bytes, and the run's phases in which it holds them."""

    name: str
    bytes: int
    phases: tuple[str, ...] = PHASES


@dataclass(frozen=True)
class HostMemory:
    """Memory on the host with most processes, if it also has the driver and all rows.

    `page_cache` counts loaded weight files, which the system can drop; it is in no sum.
    """

    consumers: tuple[Consumer, ...]
    page_cache: int

    @property
    def phases(self) -> list[int]:
        """Sum each phase's bytes, in PHASES order."""
        sizes = dict.fromkeys(PHASES, 0)
        for consumer in self.consumers:
            for phase in consumer.phases:
                sizes[phase] += consumer.bytes
        return list(sizes.values())

    @property
    def total(self) -> int:
        """Return the largest phase's bytes."""
        return max(self.phases)


def _trained_roles(config: RunConfig) -> list[Role]:
    return [role for role in (Role.ACTOR_ROLLOUT, Role.CRITIC) if role in config.roles]


def host_memory_needed(config: RunConfig, pools: list[PoolMemory]) -> HostMemory:
    """Compute each consumer's bytes on the host with most processes.

    On our private cluster all pools' processes are on one host and add up; otherwise the largest
    pool counts. Device memory and copies add up over all pools.

    Args:
        config: The run.
        pools: The pools' device memory; on CPU it is host memory.
    """
    actor = config.actor_rollout
    algorithm = config.algorithm
    sizes = {}
    for pool in pools:
        processes = config.resource_pool[pool.pool]
        sizes[pool.pool] = _processes_on_one_host(config, processes)
    shared = config.runtime.kind == "local" or is_joined(config)
    num_processes = max(sizes.values()) if shared else sum(sizes.values())
    device_bytes = 0
    copies: Counter[Role] = Counter()
    for pool in pools:
        num_on_host = _processes_on_one_host(config, pool.processes)
        device_bytes += pool.total * num_on_host
        for role_memory in pool.roles:
            copies[role_memory.role] += role_memory.copies * num_on_host
    # Rows of two iterations: the last ones are kept until the next ones replace them. Per prompt
    # token 8 bytes for the id. Per response token 50: id 8; fp32 log-probs of rollout, actor and
    # reference, KL, value; advantage, old and reference log-prob, return, value; two masks of 1.
    # Three arrays and a mask have one slot more. Lengths, id, flag, score: 29.
    row_bytes = 8 * actor.max_prompt_length + 50 * actor.max_new_tokens + 3 * 4 + 1 + 29
    num_greedy = config.training.global_batch_size if algorithm.estimator.reads_greedy else 0
    num_responses = config.samples_per_iteration
    if algorithm.filter_groups:
        num_responses *= algorithm.max_num_gen_batches or USUAL_GEN_BATCHES
    num_responses += num_greedy
    num_ahead = config.rollout.max_staleness * (config.samples_per_iteration + num_greedy)
    prompt_bytes = 8 * config.samples_per_iteration * actor.max_prompt_length
    while_training = ("iteration", "checkpoint")
    consumers = [
        Consumer(f"processes ({num_processes})", num_processes * PROCESS_BYTES),
        Consumer("driver", PROCESS_BYTES + prompt_bytes),
        Consumer("what the roles hold", device_bytes if on_cpu(config) else 0),
        Consumer(
            "rows, and those of the iteration before",
            2 * num_responses * row_bytes,
            while_training,
        ),
        Consumer(
            f"responses of {config.rollout.max_staleness} batches ahead",
            num_ahead * _begun_bytes(config),
            while_training,
        ),
    ]
    for role, copy_bytes in copies.items():
        consumers.append(Consumer(f"{role.value}: copies of what it offloads", copy_bytes))
    name = f"{Role.ROLLOUT.value}: weights for vLLM servers"
    consumers.append(Consumer(name, _served_on_one_host(config)))
    trained = _trained_roles(config)
    for role in trained:
        name = f"{role.value}: a checkpoint while it is written"
        processes = config.processes_of(role)
        num_on_host = _processes_on_one_host(config, processes)
        host_bytes = _checkpoint_bytes(config, role) * num_on_host // sum(processes)
        consumers.append(Consumer(name, host_bytes, ("checkpoint",)))
    for role in trained:
        name = f"{role.value}: final weights while they are written"
        consumers.append(Consumer(name, _export_on_one_host(config, role), ("final weights",)))
    # A folder that several roles load counts once.
    bytes_of_folder = {}
    for role in config.roles:
        if has_model(config, role):
            bytes_of_folder[config.role(role).load] = _stored(config, role)
    present = tuple(consumer for consumer in consumers if consumer.bytes)
    return HostMemory(present, sum(bytes_of_folder.values()))


def disk_needed(config: RunConfig) -> dict[str, int]:
    """Return name -> bytes in the run directory: final weights in both formats, and checkpoints.

    Counts one checkpoint more than `training.keep_last`; each has all trained roles.
    """
    sizes = {}
    checkpoint_bytes = 0
    for role in _trained_roles(config):
        megatron_bytes = _numbers(config, role) * itemsize(config.role(role))
        sizes[f"final weights of {role.value}"] = _stored(config, role) + megatron_bytes
        checkpoint_bytes += _checkpoint_bytes(config, role)
    num_checkpoints = config.training.keep_last + 1
    name = f"checkpoints ({num_checkpoints}, one being written)"
    sizes[name] = num_checkpoints * checkpoint_bytes
    return sizes


def _processes_on_one_host(config: RunConfig, processes: Sequence[int]) -> int:
    return max(processes) if is_joined(config) else sum(processes)


def _begun_bytes(config: RunConfig) -> int:
    """Return the largest size of a response that generation holds until its batch is trained.

    Python numbers: 36 bytes for the id of a token, 32 for its log-prob and 8 for its version. Each
    tensor-parallel rank has a copy.
    """
    actor = config.actor_rollout
    return config.rollout_tp * (8 * actor.max_prompt_length + 76 * actor.max_new_tokens)


def _numbers(config: RunConfig, role: Role) -> int:
    return model_elements(config.role(role).architecture, HEADS[role])


def _stored(config: RunConfig, role: Role) -> int:
    """Return the bytes in a role's folder, whose final norm shows the precision."""
    section = config.role(role)
    size = itemsize(section)
    with contextlib.suppress(KeyError, ValueError):
        size = open_hf_folder(str(section.load))["model.norm.weight"].dtype.itemsize
    return _numbers(config, role) * size


def _checkpoint_bytes(config: RunConfig, role: Role) -> int:
    section = config.role(role)
    return _trained(config, role) * (itemsize(section) + optimizer_itemsize(section))


def _trained(config: RunConfig, role: Role) -> int:
    """Count the elements that training changes: of adapters and a score head, or of layers."""
    section = config.role(role)
    head = HEADS[role]
    if section.freezes_attention:
        return sum(map(sum, split_sizes(section.architecture, head, 1, 0, 1, with_attention=False)))
    if section.adapters.rank == 0:
        return _numbers(config, role)
    score = section.architecture.hidden_size if head is Head.SCORE else 0
    return sum(adapter_sizes(section.architecture, head, section.adapters)) + score


def _served_on_one_host(config: RunConfig) -> int:
    """Return the bytes of weights that servers keep on the host with most of their devices.

    On CPU the trainer keeps them during an update, on devices they are the server's while it
    sleeps, which it does not on devices of its own.
    """
    if not config.runs_vllm or (config.train_rollout_split and not on_cpu(config)):
        return 0
    processes: Sequence[int] = config.resource_pool[config.placement[Role.ACTOR_ROLLOUT]]
    if config.train_rollout_split:
        processes = count_per_node(processes, *config.train_rollout_split)
    weights = _numbers(config, Role.ACTOR_ROLLOUT) * itemsize(config.actor_rollout)
    return weights * _processes_on_one_host(config, processes) // config.rollout_tp


def _export_on_one_host(config: RunConfig, role: Role) -> int:
    """Return the final weights' bytes on the host with most writers."""
    section = config.role(role)
    layout = config.layout(role)
    ep = section.expert_model_parallel_size
    share = _numbers(config, role) // (layout.pp * ep) * itemsize(section)
    sizes = config.resource_pool[config.placement[role]]
    ends = list(accumulate(sizes if is_joined(config) else [sum(sizes)]))
    writers_of_host: Counter[int] = Counter()
    for pp_rank in range(layout.pp):
        for ep_rank in range(ep):
            rank = layout.tp * (layout.dp * layout.cp * pp_rank + ep_rank)
            writers_of_host[bisect_right(ends, rank)] += 1
    return share * max(writers_of_host.values())
