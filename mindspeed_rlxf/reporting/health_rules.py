"""The rules that look for illnesses in the metrics of a run, and their limits in words.

A rule gets the `History` and returns a `Reading`, or None while it has too few values. `health.py`
makes findings of the readings.
"""

from __future__ import annotations

import itertools
import math
import statistics
from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mindspeed_rlxf.config.enums import HealthRule

BASELINE = 5  # first iterations that later ones are compared with

LOW_ENTROPY = 0.02  # nats; a policy that still explores has more
ENTROPY_SHARE = 0.1  # of the baseline
KL_LIMIT = 1.0  # nats per token
FALL = 0.1  # of the range of all validation scores, and of the best one
CUT_SHARE = 0.9
EQUAL_SHARE = 0.9
GAP_LIMIT = 0.05  # nats; bf16 rounds to about 0.01
GAP_GROWTH = 10.0  # times the baseline
GAP_FLOOR = 0.01  # nats; a gap below it may grow
SKEW_LIMIT = 0.2
LAG_ITERATIONS = 10
LAG_SHARE = 0.1  # of the iteration's time, for a phase to matter
CRITIC_ITERATIONS = 30


@dataclass(frozen=True)
class Reading:
    """The measurement of a rule. ill: whether it shows an illness; text: sentence with the value"""

    ill: bool
    metric: str
    value: float
    text: str


class History:
    """Finite values of the watched metrics, in the order of iterations."""

    def __init__(self) -> None:
        self._values: dict[str, array[float]] = defaultdict(lambda: array("d"))
        self.lagging: dict[str, tuple[int, list[float]]] = {}  # phase -> rank, its skews in a row

    def add(self, metrics: Mapping[str, float | None]) -> None:
        """Add an iteration's finite metrics in WATCHED; other names, None, NaN and inf are skipped.

        If there are finite validation scores, adds their mean, and the mean of the last BASELINE
        training scores (NaN without any). Updates `lagging` too.
        """
        for name in WATCHED:
            if (value := metrics.get(name)) is not None and math.isfinite(value):
                self._values[name].append(value)
        scores = [v for k, v in metrics.items() if _is_validation_score(k)]
        if validated := [v for v in scores if v is not None and math.isfinite(v)]:
            self._values[VALIDATION].append(statistics.fmean(validated))
            trained = self._values[SCORE][-BASELINE:]
            self._values[SCORE_THEN].append(statistics.fmean(trained or [math.nan]))
        self._follow_ranks(metrics)

    def first(self, name: str) -> float:
        """Return the mean of the first BASELINE values, of which there must be one at least."""
        return statistics.fmean(self._values[name][:BASELINE])

    def last(self, name: str, count: int) -> array[float]:
        """Return the last `count` values, oldest first; empty if there are fewer."""
        values = self._values[name]
        return values[-count:] if len(values) >= count else array("d")

    def all(self, name: str) -> array[float]:
        return self._values[name]

    def _follow_ranks(self, metrics: Mapping[str, float | None]) -> None:
        """Update `lagging`: phase -> (slowest rank, its skews in consecutive iterations).

        At most the last LAG_ITERATIONS skews, oldest first. They begin anew when another rank is
        slowest. (-1, []) if the skew is absent or below SKEW_LIMIT, or the phase takes less than
        LAG_SHARE of the iteration. Phases without a slowest rank in `metrics` keep their entry.
        """
        whole = metrics.get("timing/all") or math.inf
        for name, rank in metrics.items():
            kind, _, phase = name.partition("/")
            if kind != "slowest_rank" or rank is None:
                continue
            skew, seconds = metrics.get(f"skew/{phase}"), metrics.get(f"timing/{phase}") or 0.0
            before, skews = self.lagging.get(phase, (-1, []))
            if skew is None or skew < SKEW_LIMIT or seconds < LAG_SHARE * whole:
                self.lagging[phase] = (-1, [])
            elif before == int(rank):
                skews.append(skew)
                del skews[:-LAG_ITERATIONS]
            else:
                self.lagging[phase] = (int(rank), [skew])


def _is_validation_score(name: str) -> bool:
    return name.startswith("val/") and name.endswith("/score")


Rule = Callable[[History], Reading | None]
"""Measures one illness; `Reading.ill` says whether it is there. None = not enough values."""

ENTROPY, KL, SCORE = "actor/entropy", "critic/kl", "critic/score/mean"
CUT, FIT = "response_length/cut_fraction", "critic/explained_variance"
EQUAL, GAP = "rollout/equal_score_groups", "rollout/log_prob_gap_mean"
WATCHED = (ENTROPY, KL, SCORE, CUT, FIT, EQUAL, GAP)
VALIDATION, SCORE_THEN = "val/<data_source>/score", "score of training at validations"


def measure_entropy_collapse(history: History) -> Reading | None:
    """Ill if the mean entropy of the last 5 iterations is below LOW_ENTROPY nats per token.

    It must also be below ENTROPY_SHARE of the entropy at the start (`History.first`). None if there
    are fewer than 5 values.
    """
    recent = history.last(ENTROPY, 5)
    if not recent:
        return None
    value, first = statistics.fmean(recent), history.first(ENTROPY)
    ill = value < LOW_ENTROPY and value < ENTROPY_SHARE * first
    text = f"the policy's entropy is {value:.3g} nats per token, {first:.3g} at the start"
    return Reading(ill, ENTROPY, value, text)


def measure_kl_runaway(history: History, limit: float = KL_LIMIT) -> Reading | None:
    """Ill if the KL to the reference is over the limit in each of the last 3 iterations.

    The value read is their mean. limit: nats per token. None if there are fewer than 3 values.
    """
    recent = history.last(KL, 3)
    if not recent:
        return None
    value = statistics.fmean(recent)
    text = f"the KL to the reference is {value:.3g} nats per token (limit {limit:g})"
    return Reading(min(recent) > limit, KL, value, text)


def measure_falling_validation(history: History) -> Reading | None:
    """Ill if the last 3 validations each got worse, while training scores rose.

    The fall from the best validation must be at least FALL (a share) of the range of all
    validations, and of the best one's absolute value. Training scores are those at the first and
    last of these four validations. None if there are fewer than 4 values of either score.
    """
    validated, trained = history.last(VALIDATION, 4), history.last(SCORE_THEN, 4)
    if not validated or not trained:
        return None
    falls = all(later < earlier for earlier, later in itertools.pairwise(validated))
    everything = history.all(VALIDATION)
    best, now = max(everything), validated[-1]
    large = best - now >= FALL * max(best - min(everything), abs(best))
    text = (
        f"the validation score went from {validated[0]:.3g} to {now:.3g} over three validations, "
        f"the score of training from {trained[0]:.3g} to {trained[-1]:.3g}"
    )
    return Reading(falls and large and trained[-1] > trained[0], VALIDATION, now, text)


def measure_cut_responses(history: History) -> Reading | None:
    """Return a reading of the share of responses that reach the limit without EOS.

    It is ill from CUT_SHARE on. The share is the mean of the last 5 iterations; None if there are
    fewer than 5 values.
    """
    recent = history.last(CUT, 5)
    if not recent:
        return None
    value = statistics.fmean(recent)
    text = f"{value:.0%} of the responses are cut at the limit"
    return Reading(value >= CUT_SHARE, CUT, value, text)


def measure_idle_critic(history: History) -> Reading | None:
    """Ill if the median explained variance of the last 30 iterations is below 0.

    None if there are fewer than 30 values.
    """
    recent = history.last(FIT, CRITIC_ITERATIONS)
    if not recent:
        return None
    value = statistics.median(recent)
    text = f"the critic explains {value:.1%} of the variance of returns"
    return Reading(value < 0.0, FIT, value, text)


def measure_equal_scores(history: History) -> Reading | None:
    """Ill if the share of prompts with responses of equal score is EQUAL_SHARE or more.

    The share is the mean of the last 5 iterations; None if there are fewer than 5 values.
    """
    recent = history.last(EQUAL, 5)
    if not recent:
        return None
    value = statistics.fmean(recent)
    text = (
        f"for {value:.0%} of the prompts all responses score the same: estimators that compare "
        "responses learn nothing from them"
    )
    return Reading(value >= EQUAL_SHARE, EQUAL, value, text)


def measure_growing_gap(history: History) -> Reading | None:
    """Ill if log-probs of generation and training differ by over GAP_LIMIT nats on average.

    Also if they differ by over GAP_FLOOR, and by over GAP_GROWTH times the gap at the start
    (`History.first`). The gap is the median of the last 3 iterations; None if there are fewer.
    """
    recent = history.last(GAP, 3)
    if not recent:
        return None
    value, first = statistics.median(recent), history.first(GAP)
    ill = value > GAP_LIMIT or (value > GAP_FLOOR and value > GAP_GROWTH * first)
    text = (
        f"log-probs of generation and training differ by {value:.3g} nats on average, "
        f"{first:.3g} at the start"
    )
    return Reading(ill, GAP, value, text)


def measure_lagging_rank(history: History) -> Reading | None:
    """Ill if the same rank was by far the slowest of a phase LAG_ITERATIONS times in a row.

    Reads the phase with the longest row; its value is the mean skew in it, 0 if no rank is by far
    the slowest. None if no phase of several ranks was measured yet.
    """
    if not history.lagging:
        return None
    phase = max(history.lagging, key=lambda name: len(history.lagging[name][1]))
    rank, skews = history.lagging[phase]
    value = statistics.fmean(skews) if skews else 0.0
    text = (
        "no rank is the slowest of a long phase by far"
        if not skews
        else (
            f"rank {rank} was the slowest of {phase} in {len(skews)} iterations in a row, "
            f"{value:.0%} over the mean of ranks"
        )
    )
    return Reading(len(skews) >= LAG_ITERATIONS, f"skew/{phase}", value, text)


RULES: dict[HealthRule, tuple[Rule, str]] = {
    HealthRule.ENTROPY_COLLAPSE: (
        measure_entropy_collapse,
        "raise actor_rollout.entropy_coeff or algorithm.kl_ctrl.kl_coef, lower actor_rollout.lr",
    ),
    HealthRule.KL_RUNAWAY: (
        measure_kl_runaway,
        "raise algorithm.kl_ctrl.kl_coef, lower actor_rollout.lr",
    ),
    HealthRule.VALIDATION_FALLS: (
        measure_falling_validation,
        "the policy may exploit the reward: read samples.jsonl, raise algorithm.kl_ctrl.kl_coef, "
        "or take the best checkpoint",
    ),
    HealthRule.ALL_CUT: (
        measure_cut_responses,
        "raise actor_rollout.max_new_tokens, or set algorithm.missing_eos_penalty or "
        "algorithm.overlong_buffer_len",
    ),
    HealthRule.CRITIC_EXPLAINS_NOTHING: (
        measure_idle_critic,
        "train the critic first (critic.warmup_iters), or change critic.lr",
    ),
    HealthRule.EQUAL_SCORES: (
        measure_equal_scores,
        "use easier or harder prompts, algorithm.filter_groups=true, or more "
        "actor_rollout.n_samples_per_prompt",
    ),
    HealthRule.LOG_PROB_GAP: (
        measure_growing_gap,
        "compare precision and layout of generation and training; "
        "algorithm.max_log_prob_gap stops the run at the token with the largest gap",
    ),
    HealthRule.LAGGING_RANK: (
        measure_lagging_rank,
        "look at its host with `mindspeed-rlxf doctor`",
    ),
}


LIMITS: dict[HealthRule, str] = {
    HealthRule.ENTROPY_COLLAPSE: f"mean entropy of 5 iterations under {LOW_ENTROPY:g} nats and "
    f"under {ENTROPY_SHARE:.0%} of the first {BASELINE}",
    HealthRule.KL_RUNAWAY: "KL to the reference over {kl_limit:g} nats per token in 3 iterations "
    "in a row",
    HealthRule.VALIDATION_FALLS: f"3 validations in a row get worse, by {FALL:.0%} of their range "
    "or more, while training scores rise",
    HealthRule.ALL_CUT: f"{CUT_SHARE:.0%} of the responses of 5 iterations cut at the limit",
    HealthRule.CRITIC_EXPLAINS_NOTHING: "median explained variance of "
    f"{CRITIC_ITERATIONS} iterations below 0",
    HealthRule.EQUAL_SCORES: f"{EQUAL_SHARE:.0%} of the prompts of 5 iterations with responses "
    "that all score the same",
    HealthRule.LOG_PROB_GAP: f"median gap of 3 iterations over {GAP_LIMIT:g} nats, or over "
    f"{GAP_FLOOR:g} and {GAP_GROWTH:g} times the first",
    HealthRule.LAGGING_RANK: f"the same rank is slowest of a phase in {LAG_ITERATIONS} iterations "
    f"in a row, each time by {SKEW_LIMIT:.0%}, where the phase takes {LAG_SHARE:.0%} of the time",
}
"""Rule -> a text with its limits. The caller puts the run's KL limit in place of `{kl_limit}`."""


def runaway_limit(adapts: bool, target: float) -> float:
    """Return the KL per token, in nats, that counts as a runaway: KL_LIMIT.

    If the KL coefficient adapts to `target` (`adapts`), twice the target where that is larger.
    """
    return max(KL_LIMIT, 2.0 * target) if adapts else KL_LIMIT
