"""Find training problems in the metrics of a run; report each once with its value and a fix.

A problem begins in one iteration and ends after `CLEAR` iterations without it. `health.jsonl` has
one object for each begin and each end: the fields of `Finding`. Findings depend only on the
metrics, so a resumed run finds its present problems from metrics.jsonl.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mindspeed_rlxf.config.enums import HealthRule
from mindspeed_rlxf.reporting.health_rules import (
    KL_LIMIT,
    RULES,
    History,
    Reading,
    measure_kl_runaway,
)

CLEAR = 5  # iterations


@dataclass(frozen=True)
class Finding:
    """The begin or end of a problem; one object of health.jsonl.

    event:  `began` or `ended`
    value:  of the metric, over the iterations that the rule reads
    text:   a sentence with the value
    remedy: what to do; "" for an end
    stops:  whether the run must stop (`logging.stop_on`)
    """

    iteration: int
    rule: str
    event: str
    metric: str
    value: float
    text: str
    remedy: str
    stops: bool = False


class Health:
    """Checks iterations by all rules; `active` has the problems that have not ended."""

    def __init__(self, stop_on: Sequence[HealthRule] = (), kl_limit: float = KL_LIMIT) -> None:
        """stop_on: rules whose findings have `stops` set; kl_limit: nats per token"""
        self.active: dict[str, Finding] = {}
        self.readings: dict[HealthRule, Reading] = {}  # the last of each rule that has measured
        self._stop_on, self._history = tuple(stop_on), History()
        self._clear: dict[str, int] = {}
        measure_kl = functools.partial(measure_kl_runaway, limit=kl_limit)
        kl_rule = {HealthRule.KL_RUNAWAY: (measure_kl, RULES[HealthRule.KL_RUNAWAY][1])}
        self._rules = RULES | kl_rule

    def check(self, iteration: int, metrics: Mapping[str, float | None]) -> list[Finding]:
        """Add the metrics of an iteration; return the problems that begin or end in it."""
        self._history.add(metrics)
        found = []
        for rule, (measure, remedy) in self._rules.items():
            reading = measure(self._history)
            if reading is None:
                continue
            self.readings[rule] = reading
            if finding := self._update(iteration, rule, reading, remedy):
                found.append(finding)
        return found

    def _update(
        self, iteration: int, rule: HealthRule, reading: Reading, remedy: str
    ) -> Finding | None:
        name = rule.value
        if reading.ill:
            self._clear[name] = 0
            if name in self.active:
                return None
            stops = rule in self._stop_on
            measured = reading.metric, reading.value, reading.text
            self.active[name] = Finding(iteration, name, "began", *measured, remedy, stops)
            return self.active[name]
        self._clear[name] = self._clear.get(name, 0) + 1
        if name not in self.active or self._clear[name] < CLEAR:
            return None
        self.active.pop(name)
        return Finding(iteration, name, "ended", reading.metric, reading.value, reading.text, "")
