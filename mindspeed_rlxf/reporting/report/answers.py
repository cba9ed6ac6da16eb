"""Answer the first questions about a run in words: did it learn, when, what takes the time.

Every answer has its numbers and their source, so that a reader can check it.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_rlxf.reporting.report.checks import read_kl_limit
from mindspeed_rlxf.reporting.report.curves import curve_of
from mindspeed_rlxf.reporting.report.records import Iteration

Curve = Sequence[tuple[int, float]]

WINDOW = 10  # iterations in the mean at the start and at the end; at most a third of the run
CLEARLY = 3.0  # least change that counts, in standard errors
SMALL = 0.01  # least change of a score that counts if its standard error is unknown
SCORE, KL = "critic/score/mean", "critic/kl"
PHASES = {
    "rollout": ("gen", "sync"),
    "actor": ("old_log_prob", "update_actor"),
    "critic": ("values", "update_critic"),
    "reference": ("ref",),
    "reward": ("reward",),
    "experience": ("adv",),
    "validation": ("val",),
    "saving": ("save",),
}
"""Role -> its names under timing/."""


@dataclass(frozen=True)
class Answer:
    """One answer of the first screen. level: good, watch, bad, or plain"""

    question: str
    short: str
    text: str
    level: str = "plain"

    def as_json(self) -> dict[str, str]:
        return {"q": self.question, "short": self.short, "text": self.text, "level": self.level}


@dataclass(frozen=True)
class Change:
    """Means at both ends of a curve. error: standard error of their difference"""

    first: float
    last: float
    error: float
    count: int  # values in a mean

    @property
    def rise(self) -> float:
        return self.last - self.first

    @property
    def is_clear(self) -> bool:
        limit = CLEARLY * self.error if self.error else SMALL * max(abs(self.first), 1.0)
        return abs(self.rise) > limit


def validation_curve(iterations: Sequence[Iteration], metric: str) -> Curve:
    """Return (iteration, value) of a metric `val/...`, or of its mean over the data sources."""
    if metric.startswith("val/"):
        return curve_of(iterations, metric)
    found = []
    for each in iterations:
        names = [k for k in each.metrics if k.startswith("val/") and k.endswith(f"/{metric}")]
        values = [v for k in names if (v := each.metrics[k]) is not None]
        if values:
            found.append((each.number, statistics.fmean(values)))
    return found


def compare_ends(curve: Curve) -> Change | None:
    """Compare the means of the first and the last iterations; None if under six values."""
    values = [value for _, value in curve]
    if len(values) < 6:
        return None
    count = min(WINDOW, len(values) // 3)
    first, last = values[:count], values[-count:]
    error = math.hypot(*(statistics.stdev(part) / math.sqrt(count) for part in (first, last)))
    return Change(statistics.fmean(first), statistics.fmean(last), error, count)


def did_it_learn(iterations: Sequence[Iteration], metric: str, config: Mapping[str, Any]) -> Answer:
    """Answer whether the score rose: that of two or more validations, else that of training."""
    question = "Did it learn?"
    validated, trained = validation_curve(iterations, metric), curve_of(iterations, SCORE)
    change = compare_ends(trained)
    sentences = []
    clear, rise = (change.is_clear, change.rise) if change else (False, 0.0)
    if len(validated) > 1:
        (begin, first), (end, last) = validated[0], validated[-1]
        best_at, best = max(validated, key=lambda point: (point[1], -point[0]))
        rise = last - first
        clear = abs(rise) > SMALL * max(abs(first), abs(last)) and (clear or change is None)
        sentences.append(
            f"Validation {metric}: {_n(first)} {_at(begin)}, {_n(last)} {_at(end)}; "
            f"best {_n(best)} {_at(best_at)}."
        )
    if change:
        sentences.append(
            f"Training score: {_n(change.first)} at first, {_n(change.last)} at last "
            f"(means of {change.count} iterations, standard error of the difference "
            f"{_n(change.error)})."
        )
    if len(sentences) > 1:
        sentences += _say_sampling(config)
    if not sentences:
        return Answer(question, "too early to say", "Under six iterations and one validation.")
    if not clear:
        return Answer(question, "no clear change", " ".join(sentences))
    if rise > 0:
        return Answer(question, "yes", " ".join(sentences), "good")
    return Answer(question, "no, it got worse", " ".join(sentences), "bad")


def _say_sampling(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield one sentence on how validation and training decode, if the configuration says it."""
    modes = []
    for section in ("validation", "actor_rollout"):
        samples, heat = config.get(f"{section}.do_sample"), config.get(f"{section}.temperature")
        if samples is None or heat is None:
            return
        modes.append(f"at temperature {heat:g}" if samples else "greedily")
    apart = ", which sets the two apart" if modes[0] != modes[1] else ""
    yield f"Validation decodes {modes[0]}, training {modes[1]}{apart}."


def when_did_it_learn(iterations: Sequence[Iteration], metric: str) -> Answer:
    """Answer at which iterations half and nine tenths of a score's rise were reached."""
    validated = validation_curve(iterations, metric)
    trained = smooth(curve_of(iterations, SCORE))
    sentences, short = [], ""
    for name, curve in (("training score", trained), (f"validation {metric}", validated)):
        if len(curve) < 4 or (found := milestones(curve)) is None:
            continue
        half, most = found
        sentences.append(
            f"The {name} had half of its rise by iteration {half}, nine tenths by {most}."
        )
        short = short or f"half by {half}, nine tenths by {most}"
    if not sentences:
        return Answer("When?", "no rise to date", "No score rose, or there are too few of them.")
    if len(validated) > 1:
        gap = max(b - a for (a, _), (b, _) in itertools.pairwise(validated))
        sentences.append(f"It was validated at least every {gap} iterations.")
    return Answer("When?", short, " ".join(sentences))


def milestones(curve: Curve) -> tuple[int, int] | None:
    """Return the first iterations with half and nine tenths of the rise; None if it is small."""
    first, best = curve[0][1], max(value for _, value in curve)
    if best - first <= SMALL * max(abs(best), abs(first)):
        return None
    reached = [
        next(number for number, value in curve if value >= first + share * (best - first))
        for share in (0.5, 0.9)
    ]
    return reached[0], reached[1]


def smooth(curve: Curve) -> Curve:
    """Return the curve with each value replaced by the mean of it and up to two on either side."""
    values = [value for _, value in curve]
    return [
        (number, statistics.fmean(values[max(i - 2, 0) : i + 3]))
        for i, (number, _) in enumerate(curve)
    ]


def what_takes_the_time(iterations: Sequence[Iteration]) -> Answer:
    """Answer which role takes most of the run's time, with its phases and the other roles."""
    question = "Which role takes the time?"
    sums = {name: sum(_or_zero(i.metrics.get(f"timing/{name}")) for i in iterations)
            for names in (*PHASES.values(), ("all",)) for name in names}  # fmt: skip
    wall = wall_seconds(iterations)
    if not sums["all"] + sums["val"] + sums["save"]:
        return Answer(question, "not measured", "No iteration has its time.")
    roles = {role: sum(sums[n] for n in names) for role, names in PHASES.items()}
    order = sorted((r for r in roles if roles[r] > 0), key=lambda r: -roles[r])
    if not order:
        return Answer(question, "not measured", "No phase has its time.")
    top = order[0]
    phases = sorted((n for n in PHASES[top] if sums[n] > 0), key=lambda n: -sums[n])
    named = ", ".join(f"{n} {sums[n] / wall:.0%}" for n in phases)
    large = [role for role in order[1:] if roles[role] >= wall / 200]
    others = ", ".join(f"{role} {roles[role] / wall:.0%}" for role in large)
    text = f"{top.capitalize()}: {roles[top] / wall:.0%} of {_duration(wall)} ({named})."
    text += f" Then {others}." if others else ""
    if sum(roles.values()) > wall:
        text += " Phases overlap, so that the shares add up to more than 100%."
    rest = 1.0 - (roles[top] + sum(roles[role] for role in large)) / wall
    if rest >= 0.005:
        text += f" The other {rest:.0%}: inputs, transfers, the driver and shorter phases."
    return Answer(question, f"{top}, {roles[top] / wall:.0%}", text)


def wall_seconds(iterations: Sequence[Iteration]) -> float:
    """Return the seconds of all iterations, with validation and saves."""
    names = ("timing/val", "timing/save")
    return sum(
        sum(_or_zero(each.metrics.get(n)) for n in names)
        + (_or_zero(each.metrics.get("timing/all")) or (each.time_s if each.number else 0.0))
        for each in iterations
    )


def how_far_from_the_reference(iterations: Sequence[Iteration], limit: float) -> Answer:
    """Answer how large the KL to the reference is. limit: of a healthy run, nats per token"""
    question, curve = "How far from the reference?", curve_of(iterations, KL)
    if not curve:
        return Answer(question, "not measured", "The run has no reference (logging.reference_kl).")
    last = curve[-min(WINDOW, len(curve)) :]
    mean, (at, most) = statistics.fmean(v for _, v in last), max(curve, key=lambda p: p[1])
    text = (
        f"KL {_n(mean)} nats per token, mean of the last {len(last)} iterations; "
        f"{_n(curve[0][1])} in the first, {_n(curve[-1][1])} in the last; "
        f"largest {_n(most)} in iteration {at}. Healthy: at most {limit:g}."
    )
    word, level = ("healthy", "good") if mean <= limit else ("too far", "watch")
    return Answer(question, f"KL {_n(mean)}, {word}", text, level)


def answer_all(iterations: Sequence[Iteration], config: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the four answers that the report shows first, as JSON values."""
    metric = str(config.get("validation.best_metric", "score"))
    answers = (
        did_it_learn(iterations, metric, config),
        when_did_it_learn(iterations, metric),
        what_takes_the_time(iterations),
        how_far_from_the_reference(iterations, read_kl_limit(config)),
    )
    return [answer.as_json() for answer in answers]


def _or_zero(value: float | None) -> float:
    return 0.0 if value is None else value


def _at(iteration: int) -> str:
    return f"after iteration {iteration}" if iteration else "before training"


def _n(value: float) -> str:
    return f"{value:.3g}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.3g} s"
