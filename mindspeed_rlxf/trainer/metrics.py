"""Iteration metrics under their names in metrics.jsonl, including rank metrics and MFU."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from mindspeed_rlxf.algorithms.estimators import groups_that_differ
from mindspeed_rlxf.cluster.group import Pending
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.mini_batches import sample_flops
from mindspeed_rlxf.engine.flop_counter import Work
from mindspeed_rlxf.roles.reports import (
    ExperienceReport,
    GenerateReport,
    LogProbReport,
    ResponseLengths,
    ScoreReport,
    Summary,
    UpdateReport,
    explained_variance,
)

SKIPPED = "skipped_steps"


def rollout_metrics(lengths: ResponseLengths) -> dict[str, float]:
    """Return length statistics in tokens, as `prompt_length/...` and `response_length/...`.

    `eos_fraction` counts responses ended by EOS or a stop string.
    """
    finished = sum(lengths.has_eos) / len(lengths.has_eos)
    p50, p90 = np.quantile(lengths.responses, (0.5, 0.9), method="inverted_cdf")
    return {
        **_summary(lengths.prompts).named("prompt_length"),
        **_summary(lengths.responses).named("response_length"),
        "response_length/p50": float(p50),
        "response_length/p90": float(p90),
        "response_length/eos_fraction": finished,
        "response_length/truncated_fraction": 1.0 - finished,
    }


def staleness_metrics(reports: Sequence[GenerateReport], version: int) -> dict[str, float]:
    """Return `staleness/mean` and `staleness/max`, in updates, over the tokens of the samples.

    A token's staleness is `version`, that of the weights which are trained with it, minus the
    version of those that sampled it.

    Args:
        reports: Generation of the trained samples.
        version: Updates of the actor before this one.
    """
    lengths = [length for report in reports for length in report.response_lengths]
    means = [mean for report in reports for mean in report.mean_versions]
    total = sum(length * mean for length, mean in zip(lengths, means, strict=True))
    oldest = min(each for report in reports for each in report.oldest_versions)
    return {
        "staleness/mean": version - total / sum(lengths),
        "staleness/max": float(version - oldest),
    }


def agent_metrics(reports: Sequence[GenerateReport]) -> dict[str, float]:
    """Return the turns and tool calls of conversations, and how many failed, by cause.

    As `rollout/turns/...`, `rollout/tool_calls/mean` and `rollout/agent_failures/<cause>`; {} if no
    agent leads a sample.
    """
    all_records = [record for report in reports for record in report.records]
    records = [record for record in all_records if record is not None]
    if not records:
        return {}
    num_turns = [len(record.turns) for record in records]
    causes = Counter(record.failure.cause for record in records if record.failure is not None)
    return {
        "rollout/turns/mean": sum(num_turns) / len(records),
        "rollout/turns/max": float(max(num_turns)),
        "rollout/tool_calls/mean": sum(each.num_tool_calls for each in records) / len(records),
        "rollout/agent_failures": float(causes.total()),
        **{f"rollout/agent_failures/{cause}": float(n) for cause, n in sorted(causes.items())},
    }


def wait_metrics(generated: float, trained: float) -> dict[str, float]:
    """Return how long the earlier of generation and training waited for the other, in seconds.

    As `timing/wait_rollout` (training waits for the next batch) and `timing/wait_trainer`
    (generation waits for the updates); one of them is 0.

    Args:
        generated: When the next batch was complete, epoch seconds.
        trained: When the updates had ended, epoch seconds.
    """
    return {
        "timing/wait_rollout": max(generated - trained, 0.0),
        "timing/wait_trainer": max(trained - generated, 0.0),
    }


def log_prob_metrics(reports: Sequence[LogProbReport]) -> dict[str, float]:
    """Return mean and maximum gap in nats between training and generation log-probs.

    As `rollout/log_prob_gap_mean` and `_max`; with importance weights also the mean, max and min in
    `rollout/is_weight/`.
    """
    gap = Summary.merge(report.gap for report in reports)
    metrics = {"rollout/log_prob_gap_mean": gap.mean, "rollout/log_prob_gap_max": gap.largest}
    weights = [report.weight for report in reports if report.weight is not None]
    return metrics | (Summary.merge(weights).named("rollout/is_weight") if weights else {})


def score_metrics(report: ScoreReport) -> dict[str, float]:
    """Return each score part's mean as `reward/<part>`, and failed samples by cause.

    With reward functions, a part is averaged over the samples having it; otherwise a missing part
    counts as 0.
    """
    values: dict[str, list[float]] = {}
    for part in report.parts:
        for name, value in part.items():
            if not isinstance(value, str):
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
    """Return the means `train/<data source>/score` and `train/<data source>/<part>`.

    Failed samples are left out; a part is averaged over the samples having it. `sources` has each
    sample's data source.
    """
    values: dict[str, list[float]] = {}
    failures = report.failures or [None] * len(report.scores)
    parts = report.parts or [{}] * len(report.scores)
    for source, score, named, failure in zip(sources, report.scores, parts, failures, strict=True):
        for name, value in {} if failure else {"score": score, **named}.items():
            if not isinstance(value, str):
                values.setdefault(f"train/{source}/{name}", []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}


def group_metrics(report: ScoreReport, group_size: int) -> dict[str, float]:
    """Return `rollout/equal_score_groups`, the fraction of prompts with all scores equal.

    Unscored responses do not count, nor do prompts with fewer than two others; {} if no prompt
    counts.
    """
    scored = report.is_scored
    counts = [sum(scored[i : i + group_size]) for i in range(0, len(scored), group_size)]
    groups = sum(count > 1 for count in counts)
    if not groups:
        return {}
    alike = groups - len(groups_that_differ(report.scores, scored, group_size))
    return {"rollout/equal_score_groups": alike / groups}


def experience_metrics(reports: Sequence[ExperienceReport], kl_coef: float) -> dict[str, float]:
    """Return `critic/...` metrics: KL, scores, rewards and advantages, over all ranks.

    KL is missing if the reports have none (no reference, or measured by the update). A critic adds
    returns, values and the explained variance.
    """
    kl = [value for report in reports for value in report.kl]
    metrics = {"critic/kl": sum(kl) / len(kl)} if kl else {}
    metrics["critic/kl_coeff"] = kl_coef
    if num_masked := sum(report.num_masked for report in reports):
        metrics["reward/masked"] = float(num_masked)
    rejected = [report.rejected for report in reports if report.rejected is not None]
    if any(part.count for part in rejected):
        metrics["rollout/rejected_tokens"] = Summary.merge(rejected).mean
    for name in ("score", "rewards", "advantages", "returns", "values"):
        parts = [getattr(report, name) for report in reports]
        if None not in parts:  # only a critic reports returns and values
            metrics.update(Summary.merge(parts).named(f"critic/{name}"))
    if fits := [report.fit for report in reports if report.fit is not None]:
        metrics["critic/explained_variance"] = explained_variance(fits)
    return metrics


def update_metrics(role: str, report: UpdateReport) -> dict[str, float]:
    """Return a role's mean metrics over the optimizer steps taken; NaN if all were skipped.

    Names get the prefix `role/` unless they have a slash. `role/pg_loss_abs` is the mean
    |mini-batch loss|, because the plain mean is near 0 with whitened advantages.
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
    reports: Sequence[GenerateReport],
    flops: float,
    seconds: float,
    num_devices: int,
    peak_flops: float | None,
) -> dict[str, float]:
    """Return `throughput/...`: tokens and FLOPs per second, also per device.

    Counts all reported prompts and responses, including dropped samples. `flops` and `seconds`
    cover the whole iteration on all devices. `peak_flops` is per second and device, for
    `throughput/mfu`; None = unknown.
    """
    tokens = sum(sum(r.prompt_lengths) + sum(r.response_lengths) for r in reports)
    rate, per_device = tokens / seconds, flops / seconds / num_devices
    metrics = {
        "throughput/tokens_per_s": rate,
        "throughput/tokens_per_s_per_device": rate / num_devices,
        "throughput/tflops_per_device": per_device / 1e12,
    }
    return metrics | ({"throughput/mfu": per_device / peak_flops} if peak_flops else {})


def _summary(values: Sequence[int]) -> Summary:
    return Summary(len(values), float(sum(values)), float(max(values)), float(min(values)))


Phases = Mapping[str, Sequence[Pending]]
"""Name of a phase, as in `timing/<phase>` -> the calls of that phase."""


def generation_flops(config: RunConfig, generated: Sequence[GenerateReport]) -> float:
    """Return the FLOPs needed to generate the responses.

    Each response counts with its prompt, although an engine may compute a shared one once.
    """
    a = config.actor_rollout.architecture
    prompts = np.array([n for report in generated for n in report.prompt_lengths], np.float64)
    outputs = np.array([n for report in generated for n in report.response_lengths], np.float64)
    return float(np.sum(sample_flops(a, prompts + outputs, outputs)))  # type: ignore[arg-type]


def done_work(phases: Phases) -> Work:
    """Wait for the calls; return the work done by their training engines.

    Model FLOPs (arXiv:2204.02311, appendix B): recomputed activations do not count, and a backward
    pass counts as two forward passes. A Hugging Face classifier does not count.
    """
    replies = [r.work for calls in phases.values() for call in calls for r in call.replies()]
    return Work(sum(work.tokens for work in replies), sum(work.flops for work in replies))


def phase_metrics(phases: Phases) -> dict[str, float]:
    """Wait for the calls; return time, memory, skew and slowest rank of each phase.

    `timing/<phase>`: seconds, summed over calls, each by its slowest rank. `memory/<phase>`: GiB,
    maximum over all ranks. `skew/<phase>`: slowest rank's time / mean over ranks - 1; ranks waiting
    for each other in collectives take equally long, so it shows only work outside collectives.
    `slowest_rank/<phase>`: its number. The latter two cover the pool of the phase's last call, and
    need several ranks and a time above 0.
    """
    metrics = {}
    for name, calls in phases.items():
        metrics[f"timing/{name}"] = sum(call.seconds for call in calls)
        most = max(reply.memory for call in calls for reply in call.replies())
        metrics[f"memory/{name}"] = most / 1024**3
        pool = calls[-1].pool
        busy: dict[int, float] = defaultdict(float)  # by rank
        for reply in (r for call in calls if call.pool == pool for r in call.replies()):
            busy[reply.rank] += reply.seconds
        mean = sum(busy.values()) / len(busy)
        if len(busy) > 1 and mean > 0:
            slowest = max(busy, key=lambda rank: busy[rank])
            metrics[f"skew/{name}"] = busy[slowest] / mean - 1.0
            metrics[f"slowest_rank/{name}"] = float(slowest)
    return metrics


def idle_metrics(
    phases: Phases,
    sizes: Mapping[str, int],
    seconds: float,
    subpool_sizes: Mapping[str, tuple[int, int]] | None = None,
) -> dict[str, float]:
    """Wait for the calls; return `idle/<pool>`: fraction of the iteration its ranks were idle.

    Averaged over the pool's ranks, clamped to [0, 1]; 1 for a pool without calls. Calls outside
    `phases`, such as weight transfer, count as idle. A disaggregated pool also has `idle/<pool>/
    train` and `idle/<pool>/rollout`, for its training and its generating ranks.

    Args:
        phases: The iteration's calls.
        sizes: Ranks of each pool.
        seconds: Length of the iteration.
        subpool_sizes: Training and generating ranks of each disaggregated pool.
    """
    busy = {pool: [0.0] * size for pool, size in sizes.items()}  # seconds of each rank
    for call in (call for calls in phases.values() for call in calls):
        for reply in call.replies():
            busy[call.pool][reply.rank] += reply.seconds
    for pool, (num_training, _) in (subpool_sizes or {}).items():
        busy[f"{pool}/train"] = busy[pool][:num_training]
        busy[f"{pool}/rollout"] = busy[pool][num_training:]
    metrics = {}
    for name, by_rank in busy.items():
        share = sum(by_rank) / (len(by_rank) * seconds)
        metrics[f"idle/{name}"] = min(max(1.0 - share, 0.0), 1.0)
    return metrics
