"""Metrics of one iteration, under their names in metrics.jsonl."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from mindspeed_rlxf.algorithms.groups import groups_that_differ
from mindspeed_rlxf.roles.reports import (
    ExperienceReport,
    GenerateReport,
    LogProbReport,
    ResponseLengths,
    ScoreReport,
    Summary,
    UpdateReport,
    ValueFit,
)

SKIPPED = "skipped_steps"


def rollout_metrics(lengths: ResponseLengths) -> dict[str, float]:
    """Return statistics of lengths in tokens, as `prompt_length/...` and `response_length/...`.

    For both mean, max and min; for responses also p50, p90, `eos_fraction` (the share that ended
    with an EOS or a stop string) and `cut_fraction` (the rest).
    """
    finished = sum(lengths.has_eos) / len(lengths.has_eos)
    return {
        **_summary(lengths.prompts).named("prompt_length"),
        **_summary(lengths.responses).named("response_length"),
        "response_length/p50": _quantile(lengths.responses, 0.5),
        "response_length/p90": _quantile(lengths.responses, 0.9),
        "response_length/eos_fraction": finished,
        "response_length/cut_fraction": 1.0 - finished,
    }


def log_prob_metrics(reports: Sequence[LogProbReport]) -> dict[str, float]:
    """Return mean and maximum of the gaps between log-probs of training and of generation.

    The keys are `rollout/log_prob_gap_mean` and `_max`; the gaps are in nats. With importance
    weights also `rollout/is_weight/` mean, max and min.
    """
    gap = Summary.merge(report.gap for report in reports)
    metrics = {"rollout/log_prob_gap_mean": gap.mean, "rollout/log_prob_gap_max": gap.largest}
    weights = [report.weight for report in reports if report.weight is not None]
    return metrics | (Summary.merge(weights).named("rollout/is_weight") if weights else {})


def score_metrics(report: ScoreReport) -> dict[str, float]:
    """Return the mean of each named part as `reward/<part>`, and counts of failed samples by cause.

    Where functions score, a part's mean is over the samples that have it, and `reward/failed` and
    `reward/failed_<cause>` are added; else a missing part counts as 0. The score itself is in
    `experience_metrics`.
    """
    values: dict[str, list[float]] = {}
    for part in report.parts:
        for name, value in part.items():
            values.setdefault(name, []).append(value)
    by_function, count = bool(report.failures), len(report.parts)
    metrics = {
        f"reward/{name}": sum(found) / (len(found) if by_function else count)
        for name, found in sorted(values.items())
    }
    if by_function:
        causes = Counter(failure.cause for failure in report.failures if failure)
        metrics["reward/failed"] = float(causes.total())
        metrics |= {f"reward/failed_{cause}": float(n) for cause, n in sorted(causes.items())}
    return metrics


def source_metrics(report: ScoreReport, sources: Sequence[str]) -> dict[str, float]:
    """Return the means `train/<data source>/score` and `train/<data source>/<part>` of samples.

    sources: data source of each sample
    Failed samples are left out, and so is a source that has no others; a part's mean is over the
    samples that have it.
    """
    values: dict[str, list[float]] = {}
    failures = report.failures or [None] * len(report.scores)
    parts = report.parts or [{}] * len(report.scores)
    for source, score, named, failure in zip(sources, report.scores, parts, failures, strict=True):
        for name, value in {} if failure else {"score": score, **named}.items():
            values.setdefault(f"train/{source}/{name}", []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}


def group_metrics(report: ScoreReport, group_size: int) -> dict[str, float]:
    """Return `rollout/equal_score_groups`, the share of prompts whose responses all score the same.

    {} for group_size 1. Responses that could not be scored do not count, and neither do prompts
    with less than two others; {} without other prompts.
    """
    scored = report.is_scored
    counts = [sum(scored[i : i + group_size]) for i in range(0, len(scored), group_size)]
    groups = sum(count > 1 for count in counts)
    if not groups:
        return {}
    alike = groups - len(groups_that_differ(report.scores, scored, group_size))
    return {"rollout/equal_score_groups": alike / groups}


def experience_metrics(reports: Sequence[ExperienceReport], kl_coef: float) -> dict[str, float]:
    """Return metrics `critic/...` of KL, KL coefficient, scores, rewards and advantages.

    Scores, rewards and advantages as mean, maximum and minimum over all ranks; KL as mean, left out
    where the reports have none (no reference, or the update measures it); the coefficient as it is.
    With a critic also returns and values, and the explained variance. If samples were masked out,
    their number as `reward/masked`.
    """
    kl = [value for report in reports for value in report.kl]
    metrics = {"critic/kl": sum(kl) / len(kl)} if kl else {}
    metrics["critic/kl_coeff"] = kl_coef
    if num_masked := sum(report.num_masked for report in reports):
        metrics["reward/masked"] = float(num_masked)
    for name in ("score", "rewards", "advantages", "returns", "values"):
        parts = [getattr(report, name) for report in reports]
        if None not in parts:  # only a critic reports returns and values
            metrics.update(Summary.merge(parts).named(f"critic/{name}"))
    if fits := [report.fit for report in reports if report.fit is not None]:
        metrics["critic/explained_variance"] = ValueFit.explained_variance(fits)
    return metrics


def update_metrics(role: str, report: UpdateReport) -> dict[str, float]:
    """Return the means of a role's metrics over the optimizer steps that were not skipped.

    Names get the prefix `role/` unless they have a slash. A metric that only the first step has is
    that step's. NaN where all steps were skipped.
    Added: `role/lr`, the report's; with a policy loss `role/pg_loss_abs`, the mean of |mini-batch
    loss| (the plain mean is near 0 with whitened advantages); with nan_policy skip the count
    `role/skipped_steps`.
    """
    taken = [step for step in report.steps if not step.get(SKIPPED)]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values) if values else math.nan

    names = [name for name in report.steps[0] if name != SKIPPED]
    found = {name: mean([step[name] for step in taken if name in step]) for name in names}
    metrics = {name if "/" in name else f"{role}/{name}": value for name, value in found.items()}
    if "pg_loss" in names:
        metrics[f"{role}/pg_loss_abs"] = mean([abs(step["pg_loss"]) for step in taken])
    if SKIPPED in report.steps[0]:
        metrics[f"{role}/{SKIPPED}"] = float(len(report.steps) - len(taken))
    metrics[f"{role}/lr"] = report.lr
    return metrics


def throughput_metrics(
    reports: Sequence[GenerateReport], seconds: float, num_devices: int
) -> dict[str, float]:
    """Return `throughput/tokens_per_s` and `throughput/tokens_per_s_per_device`.

    Counts the tokens of all prompts and responses in the reports, also of dropped samples.
    seconds: of the whole iteration
    """
    tokens = sum(sum(r.prompt_lengths) + sum(r.response_lengths) for r in reports)
    rate = tokens / seconds
    return {
        "throughput/tokens_per_s": rate,
        "throughput/tokens_per_s_per_device": rate / num_devices,
    }


def flops_metrics(
    flops: float, seconds: float, num_devices: int, peak_flops: float | None
) -> dict[str, float]:
    """Return `throughput/tflops_per_device` and `throughput/mfu`, its share of the device's peak.

    flops:      operations of the iteration on all devices; seconds: of the iteration
    peak_flops: operations per second that one device can do; None or 0 = unknown, then no mfu
    """
    rate = flops / seconds / num_devices
    metrics = {"throughput/tflops_per_device": rate / 1e12}
    return metrics | ({"throughput/mfu": rate / peak_flops} if peak_flops else {})


def validation_score(measured: Mapping[str, float], metric: str) -> float | None:
    """Return the value of a validation metric in an iteration's metrics; None if it is not there.

    metric: `val/<data source>/<name>`, or a name, whose mean over the data sources is returned
    """
    if metric.startswith("val/"):
        return measured.get(metric)
    found = [v for k, v in measured.items() if k.startswith("val/") and k.endswith(f"/{metric}")]
    return sum(found) / len(found) if found else None


def _summary(values: Sequence[int]) -> Summary:
    return Summary(len(values), float(sum(values)), float(max(values)), float(min(values)))


def _quantile(values: Sequence[int], share: float) -> float:
    """Return the smallest of the values that is >= at least this share of them (0 to 1)."""
    return float(sorted(values)[max(math.ceil(share * len(values)) - 1, 0)])
