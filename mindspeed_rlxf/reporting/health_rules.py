"""Rules that detect training problems from a run's metrics.

A rule reads the `History` and returns a `Reading`, or None while it has too few values.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mindspeed_rlxf.config.enums import HealthRule

BASELINE = 5  # first iterations that later ones are compared with

KL_LIMIT = 1.0  # nats per token
LAG_ITERATIONS = 10
PATIENCE = 5  # validations without a new best


@dataclass(frozen=True)
class Reading:
    """A rule's measurement: whether it fires, and a sentence with the aggregated metric value."""

    unhealthy: bool
    metric: str
    value: float
    text: str


class History:
    """Finite values of the watched metrics, in iteration order."""

    def __init__(self) -> None:
        self.values: dict[str, array[float]] = defaultdict(lambda: array("d"))
        self.lagging: dict[str, tuple[int, list[float]]] = {}  # phase -> rank, its skews in a row

    def add(self, metrics: Mapping[str, float | None]) -> None:
        """Add an iteration's finite metrics in WATCHED.

        With validation scores, also add their mean and the last BASELINE training scores' mean (NaN
        without any).
        """
        for name in WATCHED:
            value = metrics.get(name)
            if value is not None and math.isfinite(value):
                self.values[name].append(value)
        validation_scores = []
        for name, score in metrics.items():
            is_score = name.startswith("val/") and name.endswith("/score")
            if is_score and score is not None and math.isfinite(score):
                validation_scores.append(score)
        if validation_scores:
            self.values[VALIDATION].append(statistics.fmean(validation_scores))
            training_scores = self.values[SCORE][-BASELINE:]
            self.values[SCORE_THEN].append(statistics.fmean(training_scores or [math.nan]))
        self._follow_ranks(metrics)

    def first(self, name: str) -> float:
        """Return the mean of the first BASELINE values; at least one must exist."""
        return statistics.fmean(self.values[name][:BASELINE])

    def last(self, name: str, count: int) -> array[float]:
        """Return the last `count` values, oldest first; empty if there are fewer."""
        values = self.values[name]
        return values[-count:] if len(values) >= count else array("d")

    def _follow_ranks(self, metrics: Mapping[str, float | None]) -> None:
        """Update `lagging`; a phase's skews restart when another rank becomes slowest."""
        iteration_s = metrics.get("timing/all") or math.inf
        for name, rank in metrics.items():
            kind, _, phase = name.partition("/")
            if kind != "slowest_rank" or rank is None:
                continue
            skew = metrics.get(f"skew/{phase}")
            phase_s = metrics.get(f"timing/{phase}") or 0.0
            previous_rank, skews = self.lagging.get(phase, (-1, []))
            if skew is None or skew < 0.2 or phase_s < 0.1 * iteration_s:
                self.lagging[phase] = (-1, [])
            elif previous_rank == int(rank):
                skews.append(skew)
                del skews[:-LAG_ITERATIONS]
            else:
                self.lagging[phase] = (int(rank), [skew])


Rule = Callable[[History], Reading | None]

ENTROPY = "actor/entropy"
KL = "critic/kl"
SCORE = "critic/score/mean"
TRUNCATED = "response_length/truncated_fraction"
EXPLAINED_VARIANCE = "critic/explained_variance"
EQUAL_SCORES = "rollout/equal_score_groups"
LOG_PROB_GAP = "rollout/log_prob_gap_mean"
WATCHED = (ENTROPY, KL, SCORE, TRUNCATED, EXPLAINED_VARIANCE, EQUAL_SCORES, LOG_PROB_GAP)
VALIDATION = "val/<data_source>/score"
SCORE_THEN = "score of training at validations"


def _entropy_collapse(history: History) -> Reading | None:
    recent = history.last(ENTROPY, 5)
    if not recent:
        return None
    entropy = statistics.fmean(recent)
    start = history.first(ENTROPY)
    unhealthy = entropy < 0.02 and entropy < 0.1 * start  # a policy that still explores has more
    text = f"the policy's entropy is {entropy:.3g} nats per token, {start:.3g} at the start"
    return Reading(unhealthy, ENTROPY, entropy, text)


def measure_kl_runaway(history: History, limit: float = KL_LIMIT) -> Reading | None:
    """Read the mean KL over 3 iterations; fires if each exceeds the limit, in nats per token."""
    recent = history.last(KL, 3)
    if not recent:
        return None
    kl = statistics.fmean(recent)
    text = f"the KL to the reference is {kl:.3g} nats per token (limit {limit:g})"
    return Reading(min(recent) > limit, KL, kl, text)


def _falling_validation(history: History) -> Reading | None:
    validation_scores = history.last(VALIDATION, 4)
    training_scores = history.last(SCORE_THEN, 4)
    if not validation_scores or not training_scores:
        return None
    falls = all(later < earlier for earlier, later in itertools.pairwise(validation_scores))
    best = max(history.values[VALIDATION])
    worst = min(history.values[VALIDATION])
    now = validation_scores[-1]
    falls_far = best - now >= 0.1 * max(best - worst, abs(best))
    training_rises = training_scores[-1] > training_scores[0]
    text = (
        f"the validation score went from {validation_scores[0]:.3g} to {now:.3g} over three "
        f"validations, the score of training from {training_scores[0]:.3g} to "
        f"{training_scores[-1]:.3g}"
    )
    return Reading(falls and falls_far and training_rises, VALIDATION, now, text)


def _validation_plateau(history: History) -> Reading | None:
    validated = history.values[VALIDATION]
    if len(validated) <= PATIENCE:
        return None
    best, recent = max(validated[:-PATIENCE]), max(validated[-PATIENCE:])
    text = f"no validation of the last {PATIENCE} was better than {best:.3g}, the best before"
    return Reading(recent <= best, VALIDATION, recent, text)


def _mean_fraction(history: History, name: str, text: str) -> Reading | None:
    recent = history.last(name, 5)
    if not recent:
        return None
    fraction = statistics.fmean(recent)
    return Reading(fraction >= 0.9, name, fraction, text.format(value=fraction))


def _idle_critic(history: History) -> Reading | None:
    recent = history.last(EXPLAINED_VARIANCE, 30)
    if not recent:
        return None
    explained = statistics.median(recent)
    text = f"the critic explains {explained:.1%} of the variance of returns"
    return Reading(explained < 0.0, EXPLAINED_VARIANCE, explained, text)


def _growing_gap(history: History) -> Reading | None:
    recent = history.last(LOG_PROB_GAP, 3)
    if not recent:
        return None
    gap = statistics.median(recent)
    start = history.first(LOG_PROB_GAP)
    # In nats: bf16 rounds to about 0.01, below which the gap may grow.
    unhealthy = gap > 0.05 or (gap > 0.01 and gap > 10.0 * start)
    text = (
        f"log-probs of generation and training differ by {gap:.3g} nats on average, "
        f"{start:.3g} at the start"
    )
    return Reading(unhealthy, LOG_PROB_GAP, gap, text)


def _lagging_rank(history: History) -> Reading | None:
    """Read the phase with the longest streak for one slowest rank."""
    if not history.lagging:
        return None
    phase = max(history.lagging, key=lambda phase: len(history.lagging[phase][1]))
    rank, skews = history.lagging[phase]
    if not skews:
        text = "no rank is the slowest of a long phase by far"
        return Reading(False, f"skew/{phase}", 0.0, text)
    mean_skew = statistics.fmean(skews)
    text = (
        f"rank {rank} was the slowest of {phase} in {len(skews)} iterations in a row, "
        f"{mean_skew:.0%} over the mean of ranks"
    )
    return Reading(len(skews) >= LAG_ITERATIONS, f"skew/{phase}", mean_skew, text)


RULES: dict[HealthRule, tuple[Rule, str]] = {
    HealthRule.ENTROPY_COLLAPSE: (
        _entropy_collapse,
        "raise actor_rollout.entropy_coeff or algorithm.kl_ctrl.kl_coef, lower actor_rollout.lr",
    ),
    HealthRule.KL_RUNAWAY: (
        measure_kl_runaway,
        "raise algorithm.kl_ctrl.kl_coef, lower actor_rollout.lr",
    ),
    HealthRule.VALIDATION_FALLS: (
        _falling_validation,
        "the policy may exploit the reward: read samples.jsonl, raise algorithm.kl_ctrl.kl_coef, "
        "or take the best checkpoint",
    ),
    HealthRule.VALIDATION_PLATEAU: (
        _validation_plateau,
        "checkpoints/best_checkpointed_iteration.txt names the best checkpoint",
    ),
    HealthRule.ALL_CUT: (
        functools.partial(
            _mean_fraction,
            name=TRUNCATED,
            text="{value:.0%} of the responses are truncated at the limit",
        ),
        "raise actor_rollout.max_new_tokens, or set algorithm.missing_eos_penalty or "
        "algorithm.overlong_buffer_len",
    ),
    HealthRule.CRITIC_EXPLAINS_NOTHING: (
        _idle_critic,
        "train the critic first (critic.warmup_iters), or change critic.lr",
    ),
    HealthRule.EQUAL_SCORES: (
        functools.partial(
            _mean_fraction,
            name=EQUAL_SCORES,
            text="for {value:.0%} of the prompts all responses score the same: estimators that "
            "compare responses learn nothing from them",
        ),
        "use easier or harder prompts, algorithm.filter_groups=true, or more "
        "actor_rollout.n_samples_per_prompt",
    ),
    HealthRule.LOG_PROB_GAP: (
        _growing_gap,
        "compare precision and layout of generation and training; fp32_head makes it smaller in "
        "bf16; "
        "algorithm.max_log_prob_gap stops the run at the token with the largest gap",
    ),
    HealthRule.LAGGING_RANK: (
        _lagging_rank,
        "look at its host with `mindspeed-rlxf doctor`",
    ),
}


def runaway_limit(adapts: bool, target: float) -> float:
    """Return the KL limit, in nats per token; an adaptive KL may raise it to twice `target`."""
    return max(KL_LIMIT, 2.0 * target) if adapts else KL_LIMIT


def rules_without_meaning(max_staleness: int) -> tuple[HealthRule, ...]:
    """Return the rules that do not apply with this `rollout.max_staleness`.

    Log-probs of generation are those of older weights above 0, so they differ from training's.
    """
    return (HealthRule.LOG_PROB_GAP,) if max_staleness > 0 else ()


CLEAR = 5  # iterations


@dataclass(frozen=True)
class Finding:
    """The start or end of a training problem; one object in health.jsonl.

    Attributes:
        event: `began` or `ended`.
        value: metric value over the iterations the rule reads.
        text: sentence with the value.
        remedy: what to do; "" for an end.
        stops: the run must stop (`logging.stop_on`).
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
    """Applies rules to each iteration; `active` holds the ongoing problems."""

    def __init__(
        self,
        stop_on: Sequence[HealthRule] = (),
        kl_limit: float = KL_LIMIT,
        excluded: Sequence[HealthRule] = (),
    ) -> None:
        """Prepare the rules.

        Args:
            stop_on: Rules whose findings stop the run.
            kl_limit: Nats per token.
            excluded: Rules that are not applied.
        """
        self.active: dict[str, Finding] = {}
        self._stop_on = tuple(stop_on)
        self._history = History()
        self._num_healthy: dict[str, int] = {}  # rule -> iterations in a row
        measure_kl = functools.partial(measure_kl_runaway, limit=kl_limit)
        remedy = RULES[HealthRule.KL_RUNAWAY][1]
        self._rules = RULES | {HealthRule.KL_RUNAWAY: (measure_kl, remedy)}
        if HealthRule.VALIDATION_PLATEAU not in stop_on:  # a run that has learnt all is not ill
            del self._rules[HealthRule.VALIDATION_PLATEAU]
        for rule in excluded:
            del self._rules[rule]

    def check(self, iteration: int, metrics: Mapping[str, float | None]) -> list[Finding]:
        """Add an iteration's metrics; return problems starting or ending with it."""
        self._history.add(metrics)
        findings = []
        for rule, (measure, remedy) in self._rules.items():
            reading = measure(self._history)
            if reading is None:
                continue
            name = rule.value
            measurement = (reading.metric, reading.value, reading.text)
            num_healthy = 0 if reading.unhealthy else self._num_healthy.get(name, 0) + 1
            self._num_healthy[name] = num_healthy
            if reading.unhealthy and name not in self.active:
                stops = rule in self._stop_on
                self.active[name] = Finding(iteration, name, "began", *measurement, remedy, stops)
                findings.append(self.active[name])
            elif name in self.active and num_healthy >= CLEAR:
                del self.active[name]
                findings.append(Finding(iteration, name, "ended", *measurement, ""))
        return findings
