"""Find the cheapest change of the configuration after which a pool fits its devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from mindspeed_rlxf.config.enums import Recompute, Role
from mindspeed_rlxf.config.errors import ConfigError
from mindspeed_rlxf.config.schema import LearningConfig, RoleConfig, RunConfig
from mindspeed_rlxf.ops.planning.memory import (
    GENERATES,
    PoolMemory,
    cache_rows,
    pool_memories,
)
from mindspeed_rlxf.ops.planning.prediction import predict
from mindspeed_rlxf.ops.planning.rates import Rates
from mindspeed_rlxf.ops.planning.variants import as_overrides, vary
from mindspeed_rlxf.ops.sizes import format_bytes

MOST_CHANGES = 10  # in one remedy
LEAST_SHARE = 0.01  # of an iteration's time: least cost assumed for a change
Changes = dict[str, Any]


@dataclass(frozen=True)
class Tried:
    """A configuration with `changes`, the bytes that a device then needs, and predicted seconds.

    seconds: of an iteration; None = no rates are known
    """

    changes: Changes
    config: RunConfig
    total: int
    seconds: float | None


def find_remedy(config: RunConfig, pool: PoolMemory, limit: int, rates: Rates | None) -> str:
    """Return as text the cheapest change after which a rank needs at most `limit` bytes.

    Considers single changes, and a combination found step by step; the shortest predicted time
    wins. Without rates, it is the single change of the fewest keys, the first of equal ones in the
    order of `_single_changes`; the combination only if no single one suffices. If nothing does, the
    text says to use more devices, and what the combination reached.
    """
    search = _Search(config, pool, limit, rates)
    singles = search.try_single_changes(search.before)
    enough = [tried for tried in singles if tried.total <= limit]
    least = search.before
    if rates is not None or not enough:
        least = search.combine_changes()
        enough += [least] if least.total <= limit else []
    if enough:
        return f"set {search.describe(min(enough, key=_sort_key))}"
    apart = ", or place roles on pools of their own" if len(pool.roles) > 1 else ""
    reached = f"; the least found is {search.describe(least)}" if least.changes else ""
    return f"use more devices{apart}, no change of keys suffices{reached}"


def _sort_key(tried: Tried) -> tuple[float, int]:
    """Return the sort key of changes that suffice: predicted seconds, then number of changes.

    The seconds are rounded to ms, and 0 if there is no prediction.
    """
    seconds = 0.0 if tried.seconds is None else round(tried.seconds, 3)
    return seconds, len(tried.changes)


class _Search:
    """Search of changes after which a device of the pool needs at most `limit` bytes."""

    def __init__(
        self, config: RunConfig, pool: PoolMemory, limit: int, rates: Rates | None
    ) -> None:
        self.config, self.pool, self.limit, self.rates = config, pool, limit, rates
        self.before = Tried({}, config, pool.total, self._seconds(config))

    def describe(self, found: Tried) -> str:
        """Format the overrides, the bytes that a device then needs, and the change of time in %.

        The change of time is left out if no rates are known.
        """
        slower = ""
        if found.seconds is not None and self.before.seconds:
            share = found.seconds / self.before.seconds - 1
            slower = f" ({share:+.0%} predicted time)"
        return f"{' '.join(as_overrides(found.changes))}: {format_bytes(found.total)}{slower}"

    def try_single_changes(self, start: Tried) -> list[Tried]:
        """Try each single change in addition to those of `start`; return those that save bytes.

        In the order of `_single_changes`, without those that break a rule of the configuration.
        """
        pool = _same_part(start.config, self.pool)
        found = [
            self._try_changes({**start.changes, **changes})
            for changes in _single_changes(start.config, pool)
        ]
        return [tried for tried in found if tried and tried.total < start.total]

    def combine_changes(self) -> Tried:
        """Add the change of the lowest price until the pool fits, then drop unneeded changes.

        Returns the last combination, even if it does not fit: after MOST_CHANGES changes, or when
        no change saves bytes.
        """
        best = self.before
        for _ in range(MOST_CHANGES):
            steps = self.try_single_changes(best)
            if not steps:
                break
            best = min(steps, key=partial(self._price, best))
            if best.total <= self.limit:
                return self._drop_unneeded(best)
        return best

    def _price(self, before: Tried, tried: Tried) -> float:
        """Return the seconds that a change costs per byte saved; the lower, the better.

        A change costs at least LEAST_SHARE of the seconds before, even if it makes the run faster.
        Bytes saved below the limit do not count. Without predicted seconds: minus the bytes saved.
        """
        saved = min(before.total - tried.total, before.total - self.limit)
        if tried.seconds is None or before.seconds is None:
            return -saved
        slower = max(0.0, tried.seconds - before.seconds)
        return (slower + LEAST_SHARE * before.seconds) / saved

    def _drop_unneeded(self, found: Tried) -> Tried:
        """Try to drop each change in turn; return the changes that remain.

        A change is dropped if the pool fits without it and no rule forbids that.
        """
        for key in list(found.changes):
            fewer = {name: value for name, value in found.changes.items() if name != key}
            tried = self._try_changes(fewer)
            if tried and tried.total <= self.limit:
                found = tried
        return found

    def _try_changes(self, changes: Changes) -> Tried | None:
        """Return the changed configuration with the pool's bytes and the seconds of an iteration.

        None if a rule of the configuration forbids the changes.
        """
        try:
            varied = vary(self.config, changes)
        except ConfigError:
            return None
        return Tried(changes, varied, _same_part(varied, self.pool).total, self._seconds(varied))

    def _seconds(self, config: RunConfig) -> float | None:
        return predict(config, self.rates).iteration_s if self.rates else None


def _same_part(config: RunConfig, pool: PoolMemory) -> PoolMemory:
    """Return the memory of the same pool, and of the same part if it is split, in `config`."""
    found = pool_memories(config, pool.pool)
    return next(each for each in found if each.part == pool.part)


def _single_changes(config: RunConfig, pool: PoolMemory) -> Iterator[Changes]:
    """Yield changes that may lower the memory of a pool, cheapest kinds first.

    The order: distributed optimizer, smaller batches, offloading of frozen weights; per role that
    learns offloading of the optimizer, recomputation, offloading of weights; larger layouts. What
    is on already is left out. Ranks that only generate: smaller batches, then twice EP if the model
    has experts, then twice TP.
    """
    roles = {each.role: config.role(each.role) for each in pool.roles}
    learning = {role: s for role, s in roles.items() if isinstance(s, LearningConfig)}
    if pool.part == GENERATES:
        yield from _smaller_batches(config, roles)
        if config.actor_rollout.architecture.num_experts:
            yield {"rollout.expert_model_parallel_size": 2 * config.rollout_ep}
        yield {"rollout.tensor_model_parallel_size": 2 * config.rollout_tp}
        return
    for role, learner in learning.items():
        if config.layout(role).dp > 1 and not learner.optimizer.use_distributed_optimizer:
            yield {f"{role.value}.use_distributed_optimizer": True}
    yield from _smaller_batches(config, roles)
    for role, section in roles.items():
        if role not in learning and not section.offload.weights:
            yield {f"{role.value}.offload.weights": True}
    for role, learner in learning.items():
        if not learner.offload.optimizer:
            yield {f"{role.value}.offload.optimizer": True}
        if learner.recompute is Recompute.NONE:
            yield {f"{role.value}.recompute": Recompute.SELECTIVE.value}
        if learner.recompute is not Recompute.FULL:
            yield {f"{role.value}.recompute": Recompute.FULL.value}
        if not learner.offload.weights:
            yield {f"{role.value}.offload.weights": True}
    yield from _larger_layouts(config, roles)


def _smaller_batches(config: RunConfig, roles: dict[Role, RoleConfig]) -> Iterator[Changes]:
    """Yield changes, each to be tried alone, with ever smaller batches.

    First the rows generated at once, if the actor is in `roles`, halved until one is left. Then the
    micro-batch of each role: its limit in tokens, halved down to one longest sequence, or without
    such a limit its size, halved down to 1.
    """
    if Role.ACTOR_ROLLOUT in roles:
        rows = cache_rows(config)
        while rows > 1:
            rows = -(-rows // 2)
            yield {"actor_rollout.num_samples_per_step": rows}
    actor = config.actor_rollout
    length = actor.max_prompt_length + actor.max_new_tokens
    for role, section in roles.items():
        tokens, size = section.max_tokens_per_micro_batch, section.micro_batch_size
        while tokens is not None and tokens > length:
            tokens = max(length, tokens // 2)
            yield {f"{role.value}.max_tokens_per_micro_batch": tokens}
        while tokens is None and size > 1:
            size //= 2
            yield {f"{role.value}.micro_batch_size": size}


def _larger_layouts(config: RunConfig, roles: dict[Role, RoleConfig]) -> Iterator[Changes]:
    """Yield sets of changes, each doubling one kind of parallelism.

    First one set per role with experts: its expert parallelism. Then tensor parallelism of all
    roles, with sequence parallelism; then pipeline parallelism of all roles that learn.
    """
    for role, section in roles.items():
        if section.architecture.num_experts:
            yield {
                f"{role.value}.expert_model_parallel_size": 2 * section.expert_model_parallel_size
            }
    for key in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        changes: Changes = {}
        for role, section in roles.items():
            if key.startswith("pipeline") and not isinstance(section, LearningConfig):
                continue
            changes[f"{role.value}.{key}"] = 2 * getattr(section, key)
            if key.startswith("tensor"):
                changes[f"{role.value}.sequence_parallel"] = True
        if changes:
            yield changes
