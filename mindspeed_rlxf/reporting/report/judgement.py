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
    excluded = rules_without_meaning(config.get("rollout.max_staleness") or 0)
    health = Health(kl_limit=kl_limit, excluded=excluded)
    problems = [
        *_failure_problems(failures or ()),
        *_health_problems(iterations, health),
        *_non_finite_problems(iterations),
    ]
    return {
        "answers": [
            did_it_learn(iterations, str(config.get("validation.best_metric", "score"))),
            what_takes_the_time(iterations),
            how_far_from_the_reference(iterations, kl_limit),
        ],
        "problems": sorted(problems, key=lambda row: row["level"]),
    }


def _failure_problems(failures: Sequence[Mapping[str, Any]]) -> Rows:
    problems = []
    for failure in failures:
        is_last = failure.get("last")
        text = f"failed{'' if is_last else ', then started again'}: {failure.get('message', '')}"
        level = "bad" if is_last else "watch"
        problems.append(_problem(level, failure.get("iteration"), text, "see the files in logs/"))
    return problems


def _health_problems(iterations: Sequence[Iteration], health: Health) -> Rows:
    """Apply the health rules to a run; problems that have ended come first."""
    active: dict[str, Finding] = {}
    problems = []
    for iteration in iterations:
        if iteration.number == 0:  # a validation before training
            continue
        for finding in health.check(iteration.number, iteration.metrics):
            if finding.event == "began":
                active[finding.rule] = finding
                continue
            began = active.pop(finding.rule)
            text = f"{began.rule}: {began.text} (ended in iteration {finding.iteration})"
            problems.append(_problem("watch", began.iteration, text, began.remedy))
    for finding in active.values():
        text = f"{finding.rule}: {finding.text}"
        problems.append(_problem("bad", finding.iteration, text, finding.remedy))
    return problems


def _non_finite_problems(iterations: Sequence[Iteration]) -> Rows:
    """Return a problem per metric that was not finite, in the first such iteration."""
    first_iterations: dict[str, int] = {}
    for iteration in iterations:
        for name, value in iteration.metrics.items():
            if value is None:
                first_iterations.setdefault(name, iteration.number)
    return [
        _problem("bad", number, f"{name} is not finite", "training.nan_policy")
        for name, number in first_iterations.items()
    ]


def did_it_learn(iterations: Sequence[Iteration], metric: str) -> dict[str, str]:
    """Answer whether the score rose; two or more validations override the training score."""
    question = "Did it learn?"
    text = ""
    is_clear = False
    rise = 0.0
    training_scores = [value for _, value in curve_of(iterations, "critic/score/mean")]
    if len(training_scores) >= 6:
        count = min(WINDOW, len(training_scores) // 3)
        start_scores = training_scores[:count]
        end_scores = training_scores[-count:]
        start = statistics.fmean(start_scores)
        end = statistics.fmean(end_scores)
        error = math.hypot(
            statistics.stdev(start_scores) / math.sqrt(count),
            statistics.stdev(end_scores) / math.sqrt(count),
        )
        rise = end - start
        is_clear = abs(rise) > (CLEARLY * error or SMALL * max(abs(start), 1.0))
        text = (
            f"Training score: {start:.3g} at first, {end:.3g} at last (means of {count} "
            f"iterations, standard error of the difference {error:.3g})."
        )
    validations = []  # (iteration, score)
    for iteration in iterations:
        score = validation_score(iteration.metrics, metric)
        if score is not None:
            validations.append((iteration.number, score))
    if len(validations) > 1:
        start_iteration, start = validations[0]
        end_iteration, end = validations[-1]
        best_iteration, best = max(validations, key=lambda point: (point[1], -point[0]))
        rise = end - start
        is_clear = is_clear or len(training_scores) < 6
        is_clear = is_clear and abs(rise) > SMALL * max(abs(start), abs(end))
        at_start = f"after iteration {start_iteration}" if start_iteration else "before training"
        text = (
            f"Validation {metric}: {start:.3g} {at_start}, {end:.3g} after iteration "
            f"{end_iteration}; best {best:.3g}, iteration {best_iteration}. {text}"
        )
    if not text:
        return _answer(question, "too early to say", "Under six iterations and one validation.")
    if not is_clear:
        return _answer(question, "no clear change", text)
    if rise > 0:
        return _answer(question, "yes", text, "good")
    return _answer(question, "no, it got worse", text, "bad")


def what_takes_the_time(iterations: Sequence[Iteration]) -> dict[str, str]:
    """Answer which role takes most time, and list the others."""
    question = "Which role takes the time?"
    wall_s = wall_seconds(iterations)
    role_s = {}
    for role, phases in PHASES.items():
        curves = [curve_of(iterations, f"timing/{phase}") for phase in phases]
        role_s[role] = sum(seconds for curve in curves for _, seconds in curve)
    measured_roles = [role for role in role_s if role_s[role] > 0]
    if not measured_roles or not wall_s:
        return _answer(question, "not measured", "No phase has its time.")
    measured_roles.sort(key=lambda role: -role_s[role])
    fractions = [f"{role_s[role] / wall_s:.0%}" for role in measured_roles]
    listed = ", ".join(map(" ".join, zip(measured_roles, fractions, strict=True)))
    text = f"Of {wall_s / 60:.3g} min: {listed}. Phases of different devices may overlap."
    return _answer(question, f"{measured_roles[0]}, {fractions[0]}", text)


def how_far_from_the_reference(iterations: Sequence[Iteration], limit: float) -> dict[str, str]:
    """Answer how large the KL to the reference is. limit: nats per token."""
    question = "How far from the reference?"
    curve = curve_of(iterations, "critic/kl")
    if not curve:
        return _answer(question, "not measured", "The run has no reference (logging.reference_kl).")
    recent = [value for _, value in curve[-WINDOW:]]
    mean = statistics.fmean(recent)
    peak_iteration, peak = max(curve, key=lambda point: point[1])
    text = (
        f"KL {mean:.3g} nats per token, mean of the last {len(recent)} iterations; "
        f"{curve[0][1]:.3g} in the first, {recent[-1]:.3g} in the last; "
        f"largest {peak:.3g} in iteration {peak_iteration}. Healthy: at most {limit:g}."
    )
    if mean <= limit:
        return _answer(question, f"KL {mean:.3g}, healthy", text, "good")
    return _answer(question, f"KL {mean:.3g}, too far", text, "watch")


def wall_seconds(iterations: Sequence[Iteration]) -> float:
    """Return the total seconds, validation and saves included."""
    total_s = 0.0
    for iteration in iterations:
        training_s = iteration.metrics.get("timing/all")
        if not training_s and iteration.number > 0:
            training_s = iteration.time_s
        total_s += training_s or 0.0
        total_s += iteration.metrics.get("timing/val") or 0.0
        total_s += iteration.metrics.get("timing/save") or 0.0
    return total_s


def _answer(question: str, short: str, text: str, level: str = "plain") -> dict[str, str]:
    return {"q": question, "short": short, "text": text, "level": level}


def _problem(level: str, iteration: Any, text: str, remedy: str) -> dict[str, Any]:
    return {"level": level, "iteration": iteration, "text": text, "remedy": remedy}
