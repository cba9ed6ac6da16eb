"""Search for layouts that fit the devices, the plainest first: `dry_run=true plan.suggest=true`.

The search tries a fixed list of layouts in a fixed order, so that the result depends on the
configuration and the limit alone. Every layout passes the rules of the configuration.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from pydantic import ValidationError

from mindspeed_rlxf.config import generation_memory
from mindspeed_rlxf.config.enums import Recompute, Role
from mindspeed_rlxf.config.problems import format_value
from mindspeed_rlxf.config.rules.between_sections import check_sections
from mindspeed_rlxf.config.schema import LearningConfig, RunConfig
from mindspeed_rlxf.ops.planning import available
from mindspeed_rlxf.ops.planning.host_memory import host_memory_needed
from mindspeed_rlxf.ops.planning.memory import PoolMemory, has_model, pool_memories
from mindspeed_rlxf.ops.planning.stage_memory import itemsize
from mindspeed_rlxf.ops.sizes import GIB, format_bytes

SIZES = (1, 2, 4, 8)
"""Of tensor and pipeline parallelism."""
FULL_TOKENS = 16384  # of a micro-batch that fills a device, if sequences are short
SHOWN, REPORT_EVERY_S = 3, 2.0
RUNTIME_BYTES, KEPT_FREE = 4 * GIB, 0.1
"""What a suggestion leaves of a device: to the runtime, and a fraction for fragmentation."""

Changes = dict[str, Any]
"""YAML key -> value, as `critic.offload.optimizer` -> True."""
Note = Callable[[str], None]


@dataclass(frozen=True)
class Suggestion:
    """A layout as changes of keys.

    Attributes:
        total: bytes that its fullest device needs.
        rounds: in which a replica generates its samples of an iteration.
        cost: sort key, see `suggest`.
    """

    changes: Changes
    total: int
    rounds: int
    cost: tuple[int, ...]


@dataclass(frozen=True)
class _Layout:
    """One point of the search; a micro-batch has the tokens of `sequences` of full length."""

    tp: int
    pp: int
    recompute: Recompute
    sequences: int


def usable_bytes(device_bytes: int) -> int:
    """Return the bytes of a device that a suggestion may use: without runtime and fragmentation."""
    return int((device_bytes - RUNTIME_BYTES) * (1 - KEPT_FREE))


def suggest(config: RunConfig, limit: int, note: Note) -> list[Suggestion]:
    """Return the plainest layouts that need at most `limit` bytes of a device and fit the host.

    Layouts are ordered by the rounds of generation (up to a factor of two they count as equal),
    then by TP x PP, PP, recomputation, offloading, and the size of micro-batches, large first: so
    what costs communication or work comes later. Returns the first of each pair of TP and PP,
    SHOWN at most; [] if none fits.

    Args:
        note: called with a line of progress, at least REPORT_EVERY_S apart.
    """
    actor, largest = config.actor_rollout, max(map(sum, config.resource_pool.values()))
    full = FULL_TOKENS // (actor.max_prompt_length + actor.max_new_tokens)
    layouts = [
        _Layout(tp, pp, recompute, sequences)
        for tp, pp, recompute, sequences in product(
            SIZES, SIZES, Recompute, sorted({1, 2, 4, max(full, 1)})
        )
        if tp * pp <= largest
    ]
    found: list[Suggestion] = []
    reported = time.monotonic()
    for number, layout in enumerate(layouts):
        if time.monotonic() - reported > REPORT_EVERY_S:
            reported = time.monotonic()
            note(f"suggest: {number} of {len(layouts)} layouts, {len(found)} fit")
        for step, offloaded in enumerate(_offloads(config)):
            if made := _evaluate(config, layout, offloaded, step, limit):
                found.append(made)
                if made.rounds == 1:
                    break  # more offloading gains nothing
    firsts: dict[tuple[int, int], Suggestion] = {}
    for suggestion in sorted(found, key=lambda each: each.cost):
        firsts.setdefault(suggestion.cost[1:3], suggestion)  # type: ignore[arg-type]
    return list(firsts.values())[:SHOWN]


def _offloads(config: RunConfig) -> Iterator[Changes]:
    """Yield sets of changes, each with all roles' offload keys, cheapest first."""
    roles = [role for role in config.roles if has_model(config, role)]
    learning = [role for role in roles if isinstance(config.role(role), LearningConfig)]
    steps: list[tuple[list[Role], bool, bool]] = [([], False, False)]
    if len(roles) > len(learning):
        steps.append(([role for role in roles if role not in learning], False, False))
    frozen = steps[-1][0]
    steps += [(frozen, True, False), (frozen, True, True)]
    for weights, optimizer, learned in steps:
        changes: Changes = {f"{role.value}.offload.weights": role in weights for role in roles}
        for role in learning:
            changes[f"{role.value}.offload.weights"] = learned
            changes[f"{role.value}.offload.optimizer"] = optimizer
        yield changes


def _layout_changes(config: RunConfig, layout: _Layout) -> Changes:
    """Return the changes of keys that make a layout, for every role with a model."""
    actor = config.actor_rollout
    tokens = layout.sequences * (actor.max_prompt_length + actor.max_new_tokens)
    changes: Changes = {}
    for role in config.roles:
        if not has_model(config, role):
            continue
        section, size = config.role(role), sum(config.processes_of(role))
        tp = min(layout.tp, size)
        learns = isinstance(section, LearningConfig)
        pp = min(layout.pp, size // tp) if learns else 1
        changes[f"{role.value}.tensor_model_parallel_size"] = tp
        changes[f"{role.value}.pipeline_model_parallel_size"] = pp
        changes[f"{role.value}.sequence_parallel"] = tp > 1
        changes[f"{role.value}.max_tokens_per_micro_batch"] = tokens
        if section.num_layers_per_virtual_pipeline_stage is not None:
            changes[f"{role.value}.num_layers_per_virtual_pipeline_stage"] = None
        if learns:
            changes[f"{role.value}.use_distributed_optimizer"] = size > tp * pp
            changes[f"{role.value}.recompute"] = layout.recompute.value
            wanted = {"recompute_method": "uniform", "recompute_num_layers": 1}
            given = {name: getattr(section, name) for name in wanted}
            changes |= {
                f"{role.value}.{name}": value
                for name, value in wanted.items()
                if getattr(given[name], "value", given[name]) != value
            }
    return changes


def _evaluate(
    config: RunConfig, layout: _Layout, offloaded: Changes, step: int, limit: int
) -> Suggestion | None:
    """Find the most rows generated at once with which a layout fits.

    Starts with all samples of a replica, and takes off rows for the bytes over `limit`, once; 8
    rows or more are then rounded down to a multiple of 8. Returns None if a rule forbids the
    layout, or it then does not fit device or host.
    offloaded: changes that offload, of degree `step`
    """
    rows_key = "actor_rollout.num_samples_per_step"
    changes = {**_layout_changes(config, layout), **offloaded}
    if (varied := _vary(config, changes)) is None:
        return None
    rows = waiting = -(-config.samples_per_iteration // varied.rollout_layout.dp)
    if (varied := _vary(config, {**changes, rows_key: rows})) is None:
        return None
    if (excess := _largest_need(varied) - limit) > 0:
        actor, tp = varied.actor_rollout, varied.rollout_tp
        length = actor.max_prompt_length + actor.max_new_tokens
        row = generation_memory.kv_cache_bytes(length, actor.architecture, tp, itemsize(actor))
        rows -= -(-excess // row)
        if rows < 1:
            return None
        rows = rows if rows < 8 else rows // 8 * 8
        if (varied := _vary(config, {**changes, rows_key: rows})) is None:
            return None
    total, rounds = _largest_need(varied), -(-waiting // rows)
    if total > limit or (
        (there := available.host_memory(varied)) is not None
        and host_memory_needed(varied, _pools(varied)).total > there
    ):
        return None
    recompute = list(Recompute).index(layout.recompute)
    sizes = layout.tp * layout.pp, layout.pp
    cost = (rounds - 1).bit_length(), *sizes, recompute, step, -layout.sequences
    return Suggestion({**changes, rows_key: rows}, total, rounds, cost)


def _pools(config: RunConfig) -> list[PoolMemory]:
    return [memory for pool in config.resource_pool for memory in pool_memories(config, pool)]


def _largest_need(config: RunConfig) -> int:
    return max(pool.total for pool in _pools(config))


def _vary(config: RunConfig, changes: Changes) -> RunConfig | None:
    """Return a copy with these keys changed; None if it breaks a rule of the configuration."""
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
    """Return the mapping that has the last name of a key; the optimizer's lie flat in a role."""
    *parents, name = key.split(".")
    for part in parents:
        payload = payload[part]
    return (payload if name in payload else payload["optimizer"]), name


def show_suggestions(config: RunConfig, found: list[Suggestion], nested: bool, limit: int) -> str:
    """Return the plan's section on suggestions: memory, rounds and overrides of each.

    Args:
        nested: the YAML has actor and reference under `actor_rollout_ref`.
        limit: bytes of a device that a layout may use.
    """
    if not found:
        return (
            f"  no layout that was tried fits {format_bytes(limit)} of a device: use more devices"
        )
    before, lines = config.model_dump(), []
    for number, each in enumerate(found, 1):
        overrides = []
        for key, value in each.changes.items():
            holder, name = _find(before, key)
            if getattr(holder[name], "value", holder[name]) == value:
                continue
            prefix = "actor_rollout_ref." * (nested and key.startswith(("actor_rollout.", "ref.")))
            shown = value if isinstance(value, str) and value.isalpha() else format_value(value)
            overrides.append(f"{prefix}{key}={shown}")
        lines += [
            f"  {number}. {format_bytes(each.total)} of a device, rounds of generation: "
            f"{each.rounds}",
            f"     {' '.join(overrides)}",
        ]
    return "\n".join(lines)
