"""Find the cheapest change of the configuration after which a pool fits its devices."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mindspeed_rlxf.config.enums import Recompute, Role
from mindspeed_rlxf.config.problems import ConfigError
from mindspeed_rlxf.config.schema import LearningConfig, RoleConfig, RunConfig
from mindspeed_rlxf.ops.planning.memory import GENERATES, PoolMemory, cache_rows, pool_memories
from mindspeed_rlxf.ops.planning.variants import as_overrides, vary
from mindspeed_rlxf.ops.sizes import format_bytes

MOST_CHANGES = 10  # in one remedy
Changes = dict[str, Any]


@dataclass(frozen=True)
class Tried:
    """A configuration with `changes`, and the bytes that a device of the pool then needs."""

    changes: Changes
    config: RunConfig
    total: int


def find_remedy(config: RunConfig, pool: PoolMemory, limit: int) -> str:
    """Return as text the cheapest change after which a rank needs at most `limit` bytes.

    Kinds of changes are allowed one after the other, cheapest first (`_kinds`). As soon as the
    allowed ones suffice, the answer is the first single change that does, else a combination. If
    nothing suffices, the text says to use more devices, and the least that was reached.
    """
    before = least = Tried({}, config, pool.total)
    for allowed in range(1, len(_kinds(config, pool)) + 1):
        for found in _try_each(config, pool, before, allowed):
            if found.total <= limit:
                return f"set {_describe(found)}"
        found = _combine(config, pool, limit, allowed)
        if found.total <= limit:
            return f"set {_describe(found)}"
        least = min(least, found, key=lambda tried: tried.total)
    apart = ", or place roles on pools of their own" if len(pool.roles) > 1 else ""
    reached = f"; the least found is {_describe(least)}" if least.changes else ""
    return f"use more devices{apart}, no change of keys suffices{reached}"


def _describe(found: Tried) -> str:
    return f"{' '.join(as_overrides(found.changes))}: {format_bytes(found.total)}"


def _combine(config: RunConfig, pool: PoolMemory, limit: int, allowed: int) -> Tried:
    """Add the change that saves most until the pool fits, then drop the changes not needed.

    Bytes saved below `limit` do not count, so that of two changes that suffice the first is taken.
    Returns the last combination if the pool never fits.
    """
    best = Tried({}, config, pool.total)
    while best.total > limit and len(best.changes) < MOST_CHANGES:
        found = min(
            _try_each(config, pool, best, allowed),
            key=lambda tried: max(tried.total, limit),
            default=best,
        )
        if found.total >= best.total:
            return best
        best = found
    for key in [*best.changes]:
        fewer = {name: value for name, value in best.changes.items() if name != key}
        tried = _try_changes(config, pool, fewer)
        if tried and tried.total <= limit:
            best = tried
    return best


def _try_each(config: RunConfig, pool: PoolMemory, start: Tried, allowed: int) -> Iterator[Tried]:
    for kind in _kinds(start.config, pool)[:allowed]:
        for changes in kind:
            if tried := _try_changes(config, pool, {**start.changes, **changes}):
                yield tried


def _try_changes(config: RunConfig, pool: PoolMemory, changes: Changes) -> Tried | None:
    try:
        varied = vary(config, changes)
    except ConfigError:
        return None
    memory = next(each for each in pool_memories(varied, pool.pool) if each.part == pool.part)
    return Tried(changes, varied, memory.total)


def _kinds(config: RunConfig, pool: PoolMemory) -> list[list[Changes]]:
    """Return changes that may lower the memory of a pool, in kinds from the cheapest on.

    The kinds: distributed optimizer; offloading of frozen weights and of optimizers, whose copies
    take few seconds; smaller batches; recomputation, and offloading of weights that learn; larger
    layouts. Ranks that only generate: smaller batches; larger layouts. What is on already is left
    out.
    """
    roles = {each.role: config.role(each.role) for each in pool.roles}
    if pool.part == GENERATES:
        larger = [{"rollout.tensor_model_parallel_size": 2 * config.rollout_tp}]
        if config.actor_rollout.architecture.num_experts:
            larger.insert(0, {"rollout.expert_model_parallel_size": 2 * config.rollout_ep})
        return [_smaller_batches(config, roles), larger]
    distributed: list[Changes] = []
    offload: list[Changes] = []
    slower: list[Changes] = []
    for role, section in roles.items():
        weights: Changes = {f"{role.value}.offload.weights": True}
        if not isinstance(section, LearningConfig):
            offload += [weights] * (not section.offload.weights)
            continue
        if config.layout(role).dp > 1 and not section.optimizer.use_distributed_optimizer:
            distributed.append({f"{role.value}.use_distributed_optimizer": True})
        if not section.offload.optimizer:
            offload.append({f"{role.value}.offload.optimizer": True})
        levels = list(Recompute)
        for level in levels[levels.index(section.recompute) + 1 :]:
            slower.append({f"{role.value}.recompute": level.value})
        slower += [weights] * (not section.offload.weights)
    return [distributed, offload, _smaller_batches(config, roles), slower, _larger_layouts(roles)]


def _smaller_batches(config: RunConfig, roles: dict[Role, RoleConfig]) -> list[Changes]:
    """Return changes with ever smaller batches, each to be tried alone."""
    found: list[Changes] = []
    if Role.ACTOR_ROLLOUT in roles:
        rows = cache_rows(config)
        while rows > 1:
            rows = -(-rows // 2)
            found.append({"actor_rollout.num_samples_per_step": rows})
    actor = config.actor_rollout
    length = actor.max_prompt_length + actor.max_new_tokens
    for role, section in roles.items():
        tokens, size = section.max_tokens_per_micro_batch, section.micro_batch_size
        while tokens is not None and tokens > length:
            tokens = max(length, tokens // 2)
            found.append({f"{role.value}.max_tokens_per_micro_batch": tokens})
        while tokens is None and size > 1:
            size //= 2
            found.append({f"{role.value}.micro_batch_size": size})
    return found


def _larger_layouts(roles: dict[Role, RoleConfig]) -> list[Changes]:
    """Return changes that each double one kind of parallelism."""
    found: list[Changes] = [
        {f"{role.value}.expert_model_parallel_size": 2 * section.expert_model_parallel_size}
        for role, section in roles.items()
        if section.architecture.num_experts
    ]
    tensor: Changes = {}
    pipeline: Changes = {}
    for role, section in roles.items():
        doubled = 2 * section.tensor_model_parallel_size
        tensor[f"{role.value}.tensor_model_parallel_size"] = doubled
        if not section.sequence_parallel:
            tensor[f"{role.value}.sequence_parallel"] = True
        if isinstance(section, LearningConfig):
            doubled = 2 * section.pipeline_model_parallel_size
            pipeline[f"{role.value}.pipeline_model_parallel_size"] = doubled
    return [*found, *(changes for changes in (tensor, pipeline) if changes)]
