"""Search layouts for the devices, the plainest first: `dry_run=true plan.suggest=true`.

The search tries a fixed list in a fixed order, so the result depends only on the configuration and
the limit. Every layout passes the configuration's rules.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import Any

from pydantic import ValidationError

from mindspeed_rlxf.config.enums import Recompute, Role
from mindspeed_rlxf.config.problems import format_value
from mindspeed_rlxf.config.schema import LearningConfig, RunConfig
from mindspeed_rlxf.config.section_rules import check_sections
from mindspeed_rlxf.ops.planning import available
from mindspeed_rlxf.ops.planning.host_memory import host_memory_needed
from mindspeed_rlxf.ops.planning.memory import PoolMemory, cache_rows, has_model, pool_memories
from mindspeed_rlxf.ops.sizes import GIB, format_bytes

SIZES = (1, 2, 4, 8)
"""Of tensor, context and pipeline parallelism."""
LONG_TOKENS = 16384
"""A sequence from here on may be divided among context-parallel ranks."""
SHOWN = 3

Changes = dict[str, Any]
"""YAML key -> value, as `critic.offload.optimizer` -> True."""


def usable_bytes(device_bytes: int) -> int:
    """Return a device's bytes without 4 GiB for the runtime and a tenth for fragmentation."""
    return int((device_bytes - 4 * GIB) * (1 - 0.1))


def suggest(config: RunConfig, nested: bool, limit: int) -> str:
    """Build the plan's section on fitting layouts: memory, rounds and overrides for each.

    Shows at most SHOWN layouts: the plainest for each TP, CP and PP, the smallest product first. If
    the configuration's own fits, it comes first, and others say what they have less of. If none
    fits, shows the nearest one and what it lacks.

    Args:
        config: The run; its pools and batch sizes stay.
        nested: Whether the YAML has actor and reference under `actor_rollout_ref`.
        limit: Bytes a layout may use on a device.
    """
    largest = max(map(sum, config.resource_pool.values()))
    actor = config.actor_rollout
    is_long = actor.max_prompt_length + actor.max_new_tokens >= LONG_TOKENS
    sizes = [
        (tp, cp, pp)
        for tp, cp, pp in product(SIZES, SIZES if is_long else (1,), SIZES)
        if tp * cp * pp <= largest
    ]
    host_bytes = available.host_memory(config)

    def lacks(layout: RunConfig, pools: list[PoolMemory]) -> tuple[int, int]:
        # Bytes missing of a device and of the host; 0 = it fits.
        of_device = max(0, max(pool.total for pool in pools) - limit)
        if host_bytes is None:
            return of_device, 0
        return of_device, max(0, host_memory_needed(layout, pools).total - host_bytes)

    lines: list[str] = []
    own_pools = pool_memories(config)
    own_costs: dict[str, int] | None = None
    if lacks(config, own_pools) == (0, 0):
        own_costs = _list_costs(config, own_pools)
        lines.append(f"  as it is: {_describe(config, own_pools)}")
    num_shown = 0
    nearest: tuple[tuple[int, int], str] | None = None
    for tp, cp, pp in sorted(sizes, key=lambda size: (prod(size), size[2], size[1])):
        for changes in _list_layouts(config, tp, cp, pp) if num_shown < SHOWN else ():
            varied = _vary(config, changes)
            if varied is None:
                continue
            pools = pool_memories(varied)
            overrides = f"     {' '.join(_list_overrides(config, changes, nested))}"
            missing = lacks(varied, pools)
            if missing != (0, 0):
                if nearest is None or missing < nearest[0]:
                    nearest = missing, f"  nearest: {_describe(varied, pools)}\n{overrides}"
                continue
            num_shown += 1
            title = f"  {num_shown}. {_describe(varied, pools)}"
            if own_costs is not None:
                costs = _list_costs(varied, pools)
                less = [name for name, cost in costs.items() if cost < own_costs[name]]
                title += f"; less {', '.join(less)}" if less else "; less of nothing than as it is"
            lines += [title, overrides]
            break
    if num_shown > 0:
        return "\n".join(lines)
    if own_costs is not None:  # with keys that are not tried
        return lines[0]
    assert nearest is not None, "the smallest sizes are always tried"
    (of_device, of_host), text = nearest
    if of_device > 0:
        reason = (
            f"no layout that was tried fits {format_bytes(limit)} of a device: use more devices; "
            f"the nearest lacks {format_bytes(of_device)} of a device"
        )
    else:
        assert host_bytes is not None
        reason = (
            f"layouts fit {format_bytes(limit)} of a device, but none that was tried fits "
            f"{format_bytes(host_bytes)} of host memory: use more hosts, or set "
            f"plan.host_memory_gib if the run's hosts have more; the nearest lacks "
            f"{format_bytes(of_host)} of it"
        )
    return f"  {reason}\n{text}"


def _describe(config: RunConfig, pools: Sequence[PoolMemory]) -> str:
    total = max(pool.total for pool in pools)
    return f"{format_bytes(total)} of a device, rounds of generation: {_count_rounds(config)}"


def _count_rounds(config: RunConfig) -> int:
    waiting = -(-config.samples_per_iteration // config.rollout_layout.dp)
    return -(-waiting // cache_rows(config))


def _list_costs(config: RunConfig, pools: Sequence[PoolMemory]) -> dict[str, int]:
    """Return what a layout costs, by name; only the order of the values counts."""
    layout = config.layout(Role.ACTOR_ROLLOUT)
    roles = [config.role(role) for role in config.roles if has_model(config, role)]
    trained = [role for role in roles if isinstance(role, LearningConfig)]
    offloaded = [role.offload.weights for role in roles]
    offloaded += [role.offload.optimizer for role in trained]
    return {
        "memory": max(pool.total for pool in pools),
        "rounds": _count_rounds(config),
        "model parallelism": layout.tp * layout.cp * layout.pp,
        "recomputation": max([*Recompute].index(role.recompute) for role in trained),
        "offloading": sum(offloaded),
    }


def _list_layouts(config: RunConfig, tp: int, cp: int, pp: int) -> Iterator[Changes]:
    """Yield key changes for TP x CP x PP ranks, cheapest layouts first.

    Recomputation costs more than offloading, and offloading more than small micro-batches. Frozen
    roles have no pipeline.
    """
    actor = config.actor_rollout
    length = actor.max_prompt_length + actor.max_new_tokens
    # If sequences are short, a micro-batch of 16384 tokens fills a device.
    sequences = sorted({1, 2, 4, max(LONG_TOKENS // length, 1)}, reverse=True)
    shared = {Role.REF} if config.shares_reference else set()
    roles = [role for role in config.roles if has_model(config, role) and role not in shared]
    frozen = [role for role in roles if not isinstance(config.role(role), LearningConfig)]
    # Roles that offload their weights, and whether optimizers are offloaded.
    offloads = [([], False), (frozen, False), (frozen, True), (roles, True)]
    for recompute, (away, optimizer), count in product(Recompute, offloads, sequences):
        changes: Changes = {}
        for role in roles:
            size = sum(config.processes_of(role))
            role_tp = min(tp, size)
            role_cp = min(cp, size // role_tp)
            role_changes: Changes = {
                "tensor_model_parallel_size": role_tp,
                "context_parallel_size": role_cp,
                "pipeline_model_parallel_size": 1,
                "num_layers_per_virtual_pipeline_stage": None,
                "sequence_parallel": role_tp > 1,
                "max_tokens_per_micro_batch": count * length,
                "offload.weights": role in away,
            }
            if role not in frozen:
                role_pp = min(pp, size // (role_tp * role_cp))
                role_changes |= {
                    "pipeline_model_parallel_size": role_pp,
                    "use_distributed_optimizer": size > role_tp * role_pp,  # over DP x CP
                    "offload.optimizer": optimizer,
                    "recompute": recompute.value,
                    "recompute_method": "uniform",
                    "recompute_num_layers": 1,
                }
            for name, value in role_changes.items():
                changes[f"{role.value}.{name}"] = value
        yield changes


def _vary(config: RunConfig, changes: Changes) -> RunConfig | None:
    """Return a copy with these keys changed; None if it breaks a configuration rule."""
    payload = config.model_dump()
    for key, value in changes.items():
        holder, name = _find(payload, key)
        holder[name] = value
    try:
        varied = RunConfig.model_validate(payload)
    except ValidationError:
        return None
    return None if any(check_sections(varied)) else varied


def _find(payload: Changes, key: str) -> tuple[Changes, str]:
    """Return the mapping with a key's last name; optimizer keys lie flat in a role."""
    *parents, name = key.split(".")
    for section in parents:
        payload = payload[section]
    if name not in payload:
        payload = payload["optimizer"]
    return payload, name


def _list_overrides(config: RunConfig, changes: Changes, nested: bool) -> Iterator[str]:
    """Yield `key=value` for each change from the configuration."""
    before = config.model_dump()
    for key, value in changes.items():
        holder, name = _find(before, key)
        if getattr(holder[name], "value", holder[name]) != value:
            prefix = "actor_rollout_ref." * (nested and key.startswith(("actor_rollout.", "ref.")))
            is_word = isinstance(value, str) and value.isalpha()
            yield f"{prefix}{key}={value if is_word else format_value(value)}"
