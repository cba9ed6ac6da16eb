"""Judge a run in words: the first questions, what was checked, and what was found.

Every answer has its numbers and their source, and every check its limit and its outcome, so that
a reader can check it, and "fine" differs from "not checked".
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_rlxf.reporting.health_rules import LAG_SHARE, LIMITS, Health, runaway_limit
from mindspeed_rlxf.reporting.metric_table import find_metric, show_range
from mindspeed_rlxf.reporting.report.records import Iteration, curve_of

Curve = Sequence[tuple[int, float]]
Rows = list[dict[str, Any]]

WINDOW = 10  # iterations of a mean or median; at both ends at most a third of the run
CLEARLY = 3.0  # least change that counts, in standard errors
SMALL = 0.01  # least change of a score that counts if its standard error is unknown
SLOW = 1.5  # times the median of all iterations before
SCORE, KL, TIME = "critic/score/mean", "critic/kl", "timing/all"
TOO_FEW = "not checked: no values, or too few"
PHASES = {
    "rollout": ("gen", "sync"), "actor": ("old_log_prob", "update_actor"),
    "critic": ("values", "update_critic"), "reference": ("ref",), "reward": ("reward",),
    "experience": ("adv",), "validation": ("val",), "saving": ("save",),
}  # fmt: skip
"""Role -> its names under timing/."""


def judge(
    iterations: Sequence[Iteration], config: Mapping[str, Any], failures: Rows | None = None
) -> dict[str, Any]:
    """Return answers {q, short, text, level}, checks {name, limit, outcome, level}, illnesses
    {level, iteration, text, remedy} with bad ones first, and the outcomes of ranges by metric.
    """
    metric = str(config.get("validation.best_metric", "score"))
    target = config.get("algorithm.kl_ctrl.target_kl")
    adapts = config.get("algorithm.kl_ctrl.type") == "adaptive"
    kl_limit = runaway_limit(adapts, float(target) if isinstance(target, (int, float)) else 0.0)
    trained = [each for each in iterations if each.number > 0]
    illnesses = []
    for each in failures or ():
        level, text = ("bad", "") if each.get("last") else ("watch", ", then started again")
        text = f"failed{text}: {each.get('message', '')}"
        illnesses.append(_finding(level, each.get("iteration"), text, "see failures below"))
    checks, ranges = [], _check_ranges(trained)
    rules = _check_rules(trained, kl_limit)
    for rows, found in (rules, _check_time(trained), _check_numbers(iterations), ranges):
        checks += rows
        illnesses += found
    return {
        "answers": [
            did_it_learn(iterations, metric),
            when_did_it_learn(iterations, metric),
            what_takes_the_time(iterations),
            how_far_from_the_reference(iterations, kl_limit),
        ],
        "checks": checks,
        "illnesses": sorted(illnesses, key=lambda row: row["level"]),
        "judged": {row["name"]: row["outcome"] for row in ranges[0]},
    }


def did_it_learn(iterations: Sequence[Iteration], metric: str) -> dict[str, str]:
    """Answer whether the score rose: that of two or more validations, else that of training."""
    validated, change = _validations(iterations, metric), compare_ends(curve_of(iterations, SCORE))
    sentences, clear, rise = [], False, 0.0
    if change:
        start, end, error, count = change
        rise = end - start
        clear = abs(rise) > (CLEARLY * error or SMALL * max(abs(start), 1.0))
    if len(validated) > 1:
        (begin, first), (final, last) = validated[0], validated[-1]
        best_at, best = max(validated, key=lambda point: (point[1], -point[0]))
        rise = last - first
        clear = abs(rise) > SMALL * max(abs(first), abs(last)) and (clear or change is None)
        sentences.append(
            f"Validation {metric}: {first:.3g} {_at(begin)}, {last:.3g} {_at(final)}; "
            f"best {best:.3g} {_at(best_at)}."
        )
    if change:
        sentences.append(
            f"Training score: {start:.3g} at first, {end:.3g} at last (means of {count} "
            f"iterations, standard error of the difference {error:.3g})."
        )
    if not sentences:
        text, short, level = "Under six iterations and one validation.", "too early to say", "plain"
    else:
        text = " ".join(sentences)
        short, level = ("yes", "good") if rise > 0 else ("no, it got worse", "bad")
        short, level = (short, level) if clear else ("no clear change", "plain")
    return _answer("Did it learn?", short, text, level)


def when_did_it_learn(iterations: Sequence[Iteration], metric: str) -> dict[str, str]:
    """Answer at which iterations half and nine tenths of the rise of a score were reached."""
    trained = curve_of(iterations, SCORE)
    smooth = [  # over five iterations
        (number, statistics.fmean(value for _, value in trained[max(i - 2, 0) : i + 3]))
        for i, (number, _) in enumerate(trained)
    ]
    curves = {"training score": smooth, f"validation {metric}": _validations(iterations, metric)}
    found = [(name, *at) for name, curve in curves.items() if (at := milestones(curve))]
    if not found:
        return _answer("When?", "no rise to date", "No score rose, or there are too few of them.")
    text = " ".join(
        f"The {name} had half of its rise by iteration {half}, nine tenths by {most}."
        for name, half, most in found
    )
    return _answer("When?", f"half by {found[0][1]}, nine tenths by {found[0][2]}", text)


def what_takes_the_time(iterations: Sequence[Iteration]) -> dict[str, str]:
    """Answer which role takes most of the run's time, with its phases and the other roles."""
    question, wall = "Which role takes the time?", wall_seconds(iterations)
    sums = {name: sum(v for _, v in curve_of(iterations, f"timing/{name}"))
            for names in PHASES.values() for name in names}  # fmt: skip
    roles = {role: sum(sums[n] for n in names) for role, names in PHASES.items()}
    order = sorted((r for r in roles if roles[r] > 0), key=lambda r: -roles[r])
    if not order or not wall:
        return _answer(question, "not measured", "No phase has its time.")
    top, large = order[0], [role for role in order[1:] if roles[role] >= wall / 200]
    phases = sorted((n for n in PHASES[top] if sums[n] > 0), key=lambda n: -sums[n])
    named = ", ".join(f"{n} {sums[n] / wall:.0%}" for n in phases)
    text = f"{top.capitalize()}: {roles[top] / wall:.0%} of {wall / 60:.3g} min ({named})."
    if large:
        text += f" Then {', '.join(f'{role} {roles[role] / wall:.0%}' for role in large)}."
    if sum(roles.values()) > wall:
        text += " Phases overlap, so that the shares add up to more than 100%."
    rest = 1.0 - sum(roles[role] for role in (top, *large)) / wall
    if rest >= 0.005:
        text += f" The other {rest:.0%}: inputs, transfers, the driver and shorter phases."
    return _answer(question, f"{top}, {roles[top] / wall:.0%}", text)


def how_far_from_the_reference(iterations: Sequence[Iteration], limit: float) -> dict[str, str]:
    """Answer how large the KL to the reference is. limit: of a healthy run, nats per token"""
    question, curve = "How far from the reference?", curve_of(iterations, KL)
    if not curve:
        return _answer(question, "not measured", "The run has no reference (logging.reference_kl).")
    last = [value for _, value in curve[-WINDOW:]]
    mean, (at, most) = statistics.fmean(last), max(curve, key=lambda point: point[1])
    word, level = ("healthy", "good") if mean <= limit else ("too far", "watch")
    text = (
        f"KL {mean:.3g} nats per token, mean of the last {len(last)} iterations; "
        f"{curve[0][1]:.3g} in the first, {last[-1]:.3g} in the last; "
        f"largest {most:.3g} in iteration {at}. Healthy: at most {limit:g}."
    )
    return _answer(question, f"KL {mean:.3g}, {word}", text, level)


def compare_ends(curve: Curve) -> tuple[float, float, float, int] | None:
    """Return the means at both ends, the standard error of their difference, and their size.

    None if there are under six values.
    """
    values = [value for _, value in curve]
    if len(values) < 6:
        return None
    count = min(WINDOW, len(values) // 3)
    first, last = values[:count], values[-count:]
    error = math.hypot(*(statistics.stdev(part) / math.sqrt(count) for part in (first, last)))
    return statistics.fmean(first), statistics.fmean(last), error, count


def milestones(curve: Curve) -> tuple[int, int] | None:
    """Return the first iterations with half and nine tenths of the rise; None if it is small."""
    if len(curve) < 4:
        return None
    first, best = curve[0][1], max(value for _, value in curve)
    if best - first <= SMALL * max(abs(best), abs(first)):
        return None
    half, most = (
        next(number for number, value in curve if value >= first + share * (best - first))
        for share in (0.5, 0.9)
    )
    return half, most


def wall_seconds(iterations: Sequence[Iteration]) -> float:
    """Return the seconds of all iterations, with validation and saves."""
    return sum(
        sum(each.metrics.get(name) or 0.0 for name in ("timing/val", "timing/save"))
        + (each.metrics.get(TIME) or (each.time_s if each.number else 0.0))
        for each in iterations
    )


def _check_rules(trained: Sequence[Iteration], kl_limit: float) -> tuple[Rows, Rows]:
    health, found = Health(kl_limit=kl_limit), []
    began: dict[str, Rows] = {}
    for each in trained:
        for event in health.check(each.number, each.metrics):
            if event.event == "began":
                text = f"{event.rule}: {event.text}"
                found.append(_finding("bad", event.iteration, text, event.remedy))
                began.setdefault(event.rule, []).append(found[-1])
            else:
                began[event.rule][-1]["level"] = "watch"
                began[event.rule][-1]["text"] += f" (ended in iteration {event.iteration})"
    checks = []
    for rule, limit in LIMITS.items():
        outcome, level = TOO_FEW, "plain"
        if rule.value in began:
            numbers = ", ".join(str(row["iteration"]) for row in began[rule.value])
            outcome, level = f"found in iteration {numbers}", "watch"
        elif rule in health.readings:
            outcome, level = f"not found; at the end: {health.readings[rule].text}", "good"
        checks.append(_check(rule.value, limit.format(kl_limit=kl_limit), outcome, level))
    return checks, found


def _check_time(trained: Sequence[Iteration]) -> tuple[Rows, Rows]:
    """Compare the median time of each ten iterations with that of the tens before."""
    curve = curve_of(trained, TIME)
    tens = [curve[i : i + WINDOW] for i in range(0, len(curve) - WINDOW + 1, WINDOW)]
    normal: list[float] = []
    slow: list[tuple[int, int, float]] = []  # first and last iteration, median
    for ten in tens:
        median = statistics.median(seconds for _, seconds in ten)
        if normal and median > SLOW * statistics.median(normal):
            slow.append((ten[0][0], ten[-1][0], median))
        else:
            normal.append(median)
    limit = f"median of {WINDOW} iterations over {SLOW:g} times that of the tens before"
    if not slow:
        result = ("not found", "good") if len(tens) > 1 else (TOO_FEW, "plain")
        return [_check("iteration time", limit, *result)], []
    now, before = statistics.median(ten[2] for ten in slow), statistics.median(normal)
    text = (
        f"iterations take {now:.3g} s in {len(slow)} of {len(tens)} tens, iterations {slow[0][0]} "
        f"to {slow[-1][1]}, {now / before:.1f} times the {before:.3g} s of the others (medians)"
    )
    remedy = "compare timing/, response_length/, memory/ and skew/ with this time"
    return [_check("iteration time", limit, text, "watch")], [
        _finding("watch", slow[0][0], text, remedy)
    ]


def _check_numbers(iterations: Sequence[Iteration]) -> tuple[Rows, Rows]:
    odd: dict[str, list[int]] = {}
    for each in iterations:
        for name in (name for name, value in each.metrics.items() if value is None):
            odd.setdefault(name, []).append(each.number)
    found = [
        _finding("bad", numbers[0],
                 f"{name} is no finite number in {len(numbers)} of {len(iterations)} iterations",
                 "look at the first of them; training.nan_policy")
        for name, numbers in odd.items()
    ]  # fmt: skip
    result = (f"found in {', '.join(sorted(odd))}", "watch") if odd else ("not found", "good")
    return [_check("finite numbers", "a metric is NaN or infinite", *result)], found


def _check_ranges(trained: Sequence[Iteration]) -> tuple[Rows, Rows]:
    """Compare each metric with its healthy range by its mean over the last iterations.

    The skew of a phase that takes little time is no finding.
    """
    checks, found = [], []
    lately = trained[-WINDOW:]
    names = {name for each in lately for name in each.metrics}
    curves = {name: [v for _, v in curve_of(lately, name)] for name in names}
    means = {name: statistics.fmean(values) for name, values in curves.items() if values}
    for name, mean in sorted(means.items()):
        metric, phase = find_metric(name), name.removeprefix("skew/")
        if metric is None or metric.healthy is None:
            continue
        limit = show_range(metric.healthy)
        is_long = phase == name or (
            means.get(f"timing/{phase}", 0.0) >= LAG_SHARE * means.get(TIME, 0.0)
        )
        outcome = text = f"{mean:.3g} in the last {len(lately)} iterations"
        if not is_long:
            outcome += f"; does not count: the phase takes under {LAG_SHARE:.0%} of the iteration"
        level = "good" if is_long else "plain"
        if is_long and not metric.is_healthy(mean):
            level, text = "watch", f"{name} is {text}, healthy: {limit}"
            found.append(_finding("watch", lately[0].number, text, metric.remedy))
        by = f"healthy: {limit}, by the mean of the last {WINDOW} iterations"
        checks.append(_check(name, by, outcome, level))
    return checks, found


def _validations(iterations: Sequence[Iteration], metric: str) -> Curve:
    """Return (iteration, value) of a metric `val/...`, or of its mean over the data sources."""
    if metric.startswith("val/"):
        return curve_of(iterations, metric)
    found = []
    for each in iterations:
        values = [value for name, value in each.metrics.items() if value is not None
                  and name.startswith("val/") and name.endswith(f"/{metric}")]  # fmt: skip
        if values:
            found.append((each.number, statistics.fmean(values)))
    return found


def _answer(question: str, short: str, text: str, level: str = "plain") -> dict[str, str]:
    return {"q": question, "short": short, "text": text, "level": level}


def _check(name: str, limit: str, outcome: str, level: str) -> dict[str, Any]:
    return {"name": name, "limit": limit, "outcome": outcome, "level": level}


def _finding(level: str, iteration: Any, text: str, remedy: str) -> dict[str, Any]:
    return {"level": level, "iteration": iteration, "text": text, "remedy": remedy}


def _at(iteration: int) -> str:
    return f"after iteration {iteration}" if iteration else "before training"
