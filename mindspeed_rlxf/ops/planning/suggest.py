"""Search for the fastest layouts that fit the devices: `dry_run=true plan.suggest=true`.

The search tries a fixed list of layouts in a fixed order, so that the result depends on the
configuration and the limit alone. Every layout passes the rules of the configuration.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from mindspeed_rlxf.config import generation_memory, memory
from mindspeed_rlxf.config.enums import Recompute, Role
from mindspeed_rlxf.config.errors import ConfigError
from mindspeed_rlxf.config.schema import LearningConfig, RunConfig
from mindspeed_rlxf.ops.planning import available
from mindspeed_rlxf.ops.planning.host import host_memory_needed
from mindspeed_rlxf.ops.planning.memory import PoolMemory, has_model, pool_memories
from mindspeed_rlxf.ops.planning.prediction import predict
from mindspeed_rlxf.ops.planning.rates import Rates
from mindspeed_rlxf.ops.planning.variants import as_overrides, vary
from mindspeed_rlxf.ops.sizes import GIB, format_bytes

SIZES = (1, 2, 4, 8)
"""Of tensor and pipeline parallelism."""
FULL_TOKENS = 16384
"""Of a micro-batch that fills a device, where sequences are short."""
SHOWN, REPORT_EVERY_S = 3, 2.0
RUNTIME_BYTES, KEPT_FREE = 4 * GIB, 0.1
"""What a suggestion leaves of a device: to the runtime, and a share for fragmentation."""

Changes = dict[str, Any]
Note = Callable[[str], None]


@dataclass(frozen=True)
class Suggestion:
    """A layout as changes of keys.

    total:   bytes that its fullest device needs
    seconds: predicted, of an iteration
    """

    changes: Changes
    total: int
    seconds: float


@dataclass(frozen=True)
class _Layout:
    """One point of the search.

    sequences: of full length, that a micro-batch has tokens for
    """

    tp: int
    pp: int
    recompute: Recompute
    sequences: int  # how many sequences of full length fit a micro-batch


def usable_bytes(device_bytes: int) -> int:
    """Return the bytes of a device that a suggestion may use: without runtime and fragmentation."""
    return int((device_bytes - RUNTIME_BYTES) * (1 - KEPT_FREE))


def suggest(config: RunConfig, rates: Rates, limit: int, note: Note) -> list[Suggestion]:
    """Return the fastest layouts that need at most `limit` bytes of a device and fit the host.

    Tries all `_layouts`, each with its best offload (`_best_offload`). Returns SHOWN at most,
    fastest first: the best of each pair of TP and PP, then others if pairs are few; [] if none
    fits.
    note: called with a line of progress, at least REPORT_EVERY_S apart
    """
    layouts = list(_layouts(config))
    found: list[tuple[_Layout, Suggestion]] = []
    reported = time.monotonic()
    for number, layout in enumerate(layouts):
        if time.monotonic() - reported > REPORT_EVERY_S:
            reported = time.monotonic()
            note(f"suggest: {number} of {len(layouts)} layouts, {len(found)} fit")
        if best := _best_offload(config, layout, rates, limit):
            found.append((layout, best))
    found.sort(
        key=lambda each: each[1].seconds
    )  # stable: the first tried of equal ones comes first
    firsts: dict[tuple[int, int], Suggestion] = {}
    for layout, suggestion in found:
        firsts.setdefault((layout.tp, layout.pp), suggestion)
    chosen = list(firsts.values())[:SHOWN]
    chosen += [each for _, each in found if each not in chosen][: SHOWN - len(chosen)]
    return sorted(chosen, key=lambda each: each.seconds)


def _layouts(config: RunConfig) -> Iterator[_Layout]:
    """Yield the layouts to try: all combinations of TP, PP, recomputation and micro-batch size.

    TP and PP are of SIZES; a micro-batch has 1, 2, 4 or as many longest sequences as FULL_TOKENS
    hold. Layouts with TP x PP over the size of the largest pool are left out.
    """
    largest = max(map(config.pool_size, config.resource_pool))
    actor = config.actor_rollout
    full = FULL_TOKENS // (actor.max_prompt_length + actor.max_new_tokens)
    batches = sorted({1, 2, 4, max(full, 1)})
    for tp, pp, recompute, sequences in product(SIZES, SIZES, Recompute, batches):
        if tp * pp <= largest:
            yield _Layout(tp, pp, recompute, sequences)


def _best_offload(
    config: RunConfig, layout: _Layout, rates: Rates, limit: int
) -> Suggestion | None:
    """Try the layout with more and more offloading; return the fastest that fits, or None.

    Stops as soon as a replica can generate all its samples at once.
    """
    best: Suggestion | None = None
    for offloaded in _offloads(config):
        made = _evaluate(config, {**_layout_changes(config, layout), **offloaded}, rates, limit)
        if made is None:
            continue
        suggestion, enough = made
        if best is None or suggestion.seconds < best.seconds:
            best = suggestion
        if enough:
            break
    return best


def _offloads(config: RunConfig) -> Iterator[Changes]:
    """Yield sets of changes, each with all offload keys of all roles with a model, cheapest first.

    First all keys are off. Then on are the weights of frozen roles (if there are any), then
    optimizers too, then the weights of all roles too.
    """
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
    """Return the changes of keys that make a layout, for every role with a model.

    TP and PP are reduced to the role's number of ranks; PP is 1 for roles that do not learn.
    Sequence parallelism is on where TP is over 1; virtual stages are unset. A micro-batch has at
    most the tokens of `layout.sequences` longest sequences. Roles that learn get recomputation,
    layer by layer, and a distributed optimizer where DP is over 1.
    """
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
            changes |= _recompute_by_layer(role, section)
    return changes


def _recompute_by_layer(role: Role, section: LearningConfig | Any) -> Changes:
    """Return the changes to recompute_method=uniform and recompute_num_layers=1.

    So full recomputation goes layer by layer, which needs least memory. Keys that have these values
    already are left out.
    """
    wanted = {"recompute_method": "uniform", "recompute_num_layers": 1}
    given = {name: getattr(section, name) for name in wanted}
    return {
        f"{role.value}.{name}": value
        for name, value in wanted.items()
        if getattr(given[name], "value", given[name]) != value
    }


def _evaluate(
    config: RunConfig, changes: Changes, rates: Rates, limit: int
) -> tuple[Suggestion, bool] | None:
    """Estimate the most rows generated at once with which a layout fits; predict its time.

    Starts with all samples of a replica, and takes off rows for the bytes over `limit`, once; 8
    rows or more are then rounded down to a multiple of 8.
    Returns the suggestion, and whether all samples of a replica are generated at once. None if a
    rule forbids the layout, or it then does not fit device or host.
    """
    rows_key = "actor_rollout.num_samples_per_step"
    try:
        rows = waiting = _samples_per_replica(vary(config, changes))
        varied = vary(config, {**changes, rows_key: rows})
        if (excess := _largest_need(varied) - limit) > 0:
            rows -= -(-excess // _row_bytes(varied))
            if rows < 1:
                return None
            rows = rows if rows < 8 else rows // 8 * 8
            varied = vary(config, {**changes, rows_key: rows})
    except ConfigError:
        return None
    total = _largest_need(varied)
    if total > limit or not _host_fits(varied):
        return None
    seconds = predict(varied, rates).iteration_s
    return Suggestion({**changes, rows_key: rows}, total, seconds), rows == waiting


def _pools(config: RunConfig) -> list[PoolMemory]:
    return [memory for pool in config.resource_pool for memory in pool_memories(config, pool)]


def _largest_need(config: RunConfig) -> int:
    return max(pool.total for pool in _pools(config))


def _host_fits(config: RunConfig) -> bool:
    """Return whether the run fits the host's memory; True if the size of that is unknown."""
    there = available.host_memory(config)
    return there is None or host_memory_needed(config, _pools(config)).total <= there


def _samples_per_replica(config: RunConfig) -> int:
    """Return the number of samples that a rollout replica has to generate in an iteration."""
    return -(-config.samples_per_iteration // config.rollout_layout.dp)


def _row_bytes(config: RunConfig) -> int:
    """Return the bytes of one row's KV cache on a device, for the longest prompt and response.

    Of all layers: a rollout has no pipeline stages.
    """
    actor, tp = config.actor_rollout, config.rollout_tp
    length = actor.max_prompt_length + actor.max_new_tokens
    return generation_memory.kv_cache_bytes(length, actor.architecture, tp, memory.itemsize(actor))


def show_suggestions(
    config: RunConfig, found: list[Suggestion], now: float, nested: bool, limit: int
) -> str:
    """Return the plan's section on suggestions: predicted time, memory and overrides of each.

    With an empty `found` it says that no layout fits `limit`.
    now:    predicted seconds of an iteration with the configuration as it is
    nested: the YAML has actor and reference under `actor_rollout_ref`
    limit:  bytes of a device that a layout may use
    """
    if not found:
        return (
            f"  no layout that was tried fits {format_bytes(limit)} of a device: use more devices"
        )
    lines = []
    for number, each in enumerate(found, 1):
        change = f"{each.seconds / now - 1:+.0%} beside this configuration"
        lines += [
            f"  {number}. predicted {each.seconds:,.3g} s an iteration ({change}), "
            f"{format_bytes(each.total)} of a device",
            f"     {' '.join(as_overrides(_without_unchanged(config, each.changes), nested))}",
        ]
    return "\n".join(lines)


def _without_unchanged(config: RunConfig, changes: Changes) -> Changes:
    """Return the changes without keys that have the same value in `config` already."""
    varied, before = vary(config, changes).model_dump(), config.model_dump()
    return {
        key: value
        for key, value in changes.items()
        if _value_at(varied, key) != _value_at(before, key)
    }


def _value_at(payload: Changes, path: str) -> Any:
    """Return the value of a key such as `actor_rollout.lr`. Raises KeyError if it is absent.

    A last name that is not there is looked for in `optimizer` beside it.
    """
    *parents, last = path.split(".")
    for part in parents:
        payload = payload[part]
    return payload[last] if last in payload else payload["optimizer"][last]
