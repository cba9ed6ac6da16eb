"""Find illnesses of a run in its metrics, and report each once with its value and a remedy.

    health = Health()
    for finding in health.check(iteration, metrics):   # illnesses that begin or end here
        print(finding.line)

An illness begins in one iteration and ends after `CLEAR` iterations without it. `health.jsonl` has
one object for each begin and each end: the fields of `Finding`. Findings depend only on the
metrics, so that a resumed run finds its present illnesses from metrics.jsonl (`replay`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mindspeed_rlxf.config.enums import HealthRule
from mindspeed_rlxf.reporting.health_rules import (
    KL_LIMIT,
    RULES,
    History,
    Reading,
    measure_kl_runaway,
)

CLEAR = 5  # iterations without an illness after which it has ended


@dataclass(frozen=True)
class Finding:
    """The begin or end of an illness in an iteration; one object of health.jsonl.

    rule:   a word of `HealthRule`
    event:  `began` or `ended`
    metric: the measured metric
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

    @property
    def line(self) -> str:
        """Return the line for the console: a warning with the remedy, or the end of the illness."""
        if self.event == "ended":
            return f"health: {self.rule} has ended, iteration {self.iteration}: {self.text}"
        return f"warning: {self.rule}: {self.text}; {self.remedy}"


class Health:
    """Checks iterations by all rules, and keeps the illnesses that have begun and not ended."""

    def __init__(self, stop_on: Sequence[HealthRule] = (), kl_limit: float = KL_LIMIT) -> None:
        """stop_on: rules whose findings have `stops` set; kl_limit: nats per token"""
        self.active: dict[str, Finding] = {}
        self.readings: dict[HealthRule, Reading] = {}  # the last of each rule that has measured
        self._stop_on, self._history = tuple(stop_on), History()
        self._clear: dict[str, int] = {}
        self._rules = dict(RULES)
        remedy = RULES[HealthRule.KL_RUNAWAY][1]
        self._rules[HealthRule.KL_RUNAWAY] = (
            lambda history: measure_kl_runaway(history, kl_limit),
            remedy,
        )

    def check(self, iteration: int, metrics: Mapping[str, float | None]) -> list[Finding]:
        """Add the metrics of an iteration; return the illnesses that begin or end in it.

        Puts each rule's reading into `readings`; rules with too few values keep their earlier one.
        """
        self._history.add(metrics)
        found = []
        for rule, (measure, remedy) in self._rules.items():
            reading = measure(self._history)
            if reading is None:
                continue
            self.readings[rule] = reading
            if finding := self._update_illness(iteration, rule, reading, remedy):
                found.append(finding)
        return found

    def replay(self, iteration: int, metrics: Mapping[str, float | None]) -> None:
        """Add metrics of an earlier iteration or a separate validation; report nothing."""
        self.check(iteration, metrics)

    def _update_illness(
        self, iteration: int, rule: HealthRule, reading: Reading, remedy: str
    ) -> Finding | None:
        """Update `active` by a reading; return the begin or end of an illness, None if neither.

        It begins with the first ill reading, and ends after CLEAR healthy ones in a row.
        """
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
        began = self.active.pop(name)
        return replace(
            began, iteration=iteration, event="ended", metric=reading.metric,
            value=reading.value, text=reading.text, remedy="", stops=False,
        )  # fmt: skip
