"""Answer the first questions about a run, and list its health findings."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_rlxf.reporting.health_rules import (
    Finding,
    Health,
    rules_without_meaning,
    runaway_limit,
)
from mindspeed_rlxf.reporting.metric_table import validation_score
from mindspeed_rlxf.reporting.report.records import Iteration, curve_of

Rows = list[dict[str, Any]]

WINDOW = 10  # iterations of a mean; at both ends at most a third of the run
CLEARLY = 3.0  # least change that counts, in standard errors
SMALL = 0.01  # least change of a score that counts if its standard error is unknown
PHASES = {
    "rollout": ("gen", "sync"), "actor": ("old_log_prob", "update_actor"),
    "critic": ("values", "update_critic"), "reference": ("ref",), "reward": ("reward",),
    "experience": ("adv",), "validation": ("val",), "saving": ("save",),
}  # fmt: skip
"""Role -> its names under timing/."""


def judge(
    iterations: Sequence[Iteration], config: Mapping[str, Any], failures: Rows | None = None
) -> dict[str, Any]:
    """Return "answers" {q, short, text, level} and "problems" {level, iteration, text, remedy}.

    Problems are failures, health findings and non-finite metrics; bad ones come first.
    """
    target = config.get("algorithm.kl_ctrl.target_kl")
    adapts = config.get("algorithm.kl_ctrl.type") == "adaptive"
    kl_limit = runaway_limit(adapts, float(target) if isinstance(target, (int, float)) else 0.0)
    problems = []
    for each in failures or ():
        level, text = ("bad", "") if each.get("last") else ("watch", ", then started again")
        text = f"failed{text}: {each.get('message', '')}"
        problems.append(_problem(level, each.get("iteration"), text, "see the files in logs/"))
    excluded = rules_without_meaning(config.get("rollout.max_staleness") or 0)
    health = Health(kl_limit=kl_limit, excluded=excluded)
    active, missing = dict[str, Finding](), dict[str, int]()
    for iteration in iterations:
        found = health.check(iteration.number, iteration.metrics) if iteration.number > 0 else []
        for event in found:
            if event.event == "began":
                active[event.rule] = event
            else:
                began = active.pop(event.rule)
                text = f"{began.rule}: {began.text} (ended in iteration {event.iteration})"
                problems.append(_problem("watch", began.iteration, text, began.remedy))
        for name, value in iteration.metrics.items():
            if value is None:
                missing.setdefault(name, iteration.number)
    for event in active.values():
        text = f"{event.rule}: {event.text}"
        problems.append(_problem("bad", event.iteration, text, event.remedy))
    for name, number in missing.items():
        problems.append(_problem("bad", number, f"{name} is not finite", "training.nan_policy"))
    return {
        "answers": [
            did_it_learn(iterations, str(config.get("validation.best_metric", "score"))),
            what_takes_the_time(iterations),
            how_far_from_the_reference(iterations, kl_limit),
        ],
        "problems": sorted(problems, key=lambda row: row["level"]),
    }


def did_it_learn(iterations: Sequence[Iteration], metric: str) -> dict[str, str]:
    """Answer whether the score rose; two or more validations override the training score."""
    question, text, clear, rise = "Did it learn?", "", False, 0.0
    scores = ((each.number, validation_score(each.metrics, metric)) for each in iterations)
    validated = [(number, score) for number, score in scores if score is not None]
    trained = [value for _, value in curve_of(iterations, "critic/score/mean")]
    if len(trained) >= 6:
        count = min(WINDOW, len(trained) // 3)
        ends = trained[:count], trained[-count:]
        start, end = map(statistics.fmean, ends)
        error = math.hypot(*(statistics.stdev(part) / math.sqrt(count) for part in ends))
        rise, clear = (
            end - start,
            abs(end - start) > (CLEARLY * error or SMALL * max(abs(start), 1.0)),
        )
        text = (
            f"Training score: {start:.3g} at first, {end:.3g} at last (means of {count} "
            f"iterations, standard error of the difference {error:.3g})."
        )
    if len(validated) > 1:
        (begin, first), (final, last) = validated[0], validated[-1]
        best_at, best = max(validated, key=lambda point: (point[1], -point[0]))
        rise = last - first
        clear = abs(rise) > SMALL * max(abs(first), abs(last)) and (clear or len(trained) < 6)
        at_first = f"after iteration {begin}" if begin else "before training"
        text = (
            f"Validation {metric}: {first:.3g} {at_first}, {last:.3g} after iteration {final}; "
            f"best {best:.3g}, iteration {best_at}. {text}"
        )
    if not text:
        return _answer(question, "too early to say", "Under six iterations and one validation.")
    if not clear:
        return _answer(question, "no clear change", text)
    if rise > 0:
        return _answer(question, "yes", text, "good")
    return _answer(question, "no, it got worse", text, "bad")


def what_takes_the_time(iterations: Sequence[Iteration]) -> dict[str, str]:
    """Answer which role takes most time, and list the others."""
    question, wall = "Which role takes the time?", wall_seconds(iterations)
    seconds = {
        role: sum(v for name in names for _, v in curve_of(iterations, f"timing/{name}"))
        for role, names in PHASES.items()
    }
    order = sorted((role for role in seconds if seconds[role] > 0), key=lambda r: -seconds[r])
    if not order or not wall:
        return _answer(question, "not measured", "No phase has its time.")
    parts = ", ".join(f"{role} {seconds[role] / wall:.0%}" for role in order)
    text = f"Of {wall / 60:.3g} min: {parts}. Phases of different devices may overlap."
    return _answer(question, f"{order[0]}, {seconds[order[0]] / wall:.0%}", text)


def how_far_from_the_reference(iterations: Sequence[Iteration], limit: float) -> dict[str, str]:
    """Answer how large the KL to the reference is. limit: nats per token."""
    question, curve = "How far from the reference?", curve_of(iterations, "critic/kl")
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


def wall_seconds(iterations: Sequence[Iteration]) -> float:
    """Return the total seconds, validation and saves included."""
    return sum(
        sum(each.metrics.get(name) or 0.0 for name in ("timing/val", "timing/save"))
        + (each.metrics.get("timing/all") or (each.time_s if each.number else 0.0))
        for each in iterations
    )


def _answer(question: str, short: str, text: str, level: str = "plain") -> dict[str, str]:
    return {"q": question, "short": short, "text": text, "level": level}


def _problem(level: str, iteration: Any, text: str, remedy: str) -> dict[str, Any]:
    return {"level": level, "iteration": iteration, "text": text, "remedy": remedy}
