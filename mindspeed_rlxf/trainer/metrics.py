"""Iteration metrics under their names in metrics.jsonl, including rank metrics and MFU."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from mindspeed_rlxf.algorithms.estimators import groups_that_differ
from mindspeed_rlxf.cluster.group import RoleFuture
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
    eos_fraction = sum(lengths.has_eos) / len(lengths.has_eos)
    p50, p90 = np.quantile(lengths.responses, (0.5, 0.9), method="inverted_cdf")
    return {
        **_summary(lengths.prompts).named("prompt_length"),
        **_summary(lengths.responses).named("response_length"),
        "response_length/p50": float(p50),
        "response_length/p90": float(p90),
        "response_length/eos_fraction": eos_fraction,
        "response_length/truncated_fraction": 1.0 - eos_fraction,
    }


def staleness_metrics(reports: Sequence[GenerateReport], version: int) -> dict[str, float]:
    """Return `staleness/mean` and `staleness/max`, in updates, over the tokens of the samples.

    A token's staleness is `version`, that of the weights which are trained with it, minus the
    version of those that sampled it.

    Args:
        reports: Generation of the trained samples.
        version: Updates of the actor before this one.
    """
    num_tokens = 0
    sum_of_versions = 0.0  # over tokens
    for report in reports:
        for length, mean_version in zip(report.response_lengths, report.mean_versions, strict=True):
            num_tokens += length
            sum_of_versions += length * mean_version
    oldest_version = min(min(report.oldest_versions) for report in reports)
    return {
        "staleness/mean": version - sum_of_versions / num_tokens,
        "staleness/max": float(version - oldest_version),
    }


def agent_metrics(reports: Sequence[GenerateReport]) -> dict[str, float]:
    """Return the turns and tool calls of conversations, and how many failed, by cause.

    As `rollout/turns/...`, `rollout/tool_calls/mean` and `rollout/agent_failures/<cause>`; {} if no
    agent leads a sample.
    """
    num_turns: list[int] = []  # of each conversation, as num_tool_calls
    num_tool_calls: list[int] = []
    failures: Counter[str] = Counter()  # by cause
    for record in chain.from_iterable(report.records for report in reports):
        if record is None:
            continue
        num_turns.append(len(record.turns))
        num_tool_calls.append(record.num_tool_calls)
        if record.failure is not None:
            failures[record.failure.cause] += 1
    if not num_turns:
        return {}
    metrics = {
        "rollout/turns/mean": _mean(num_turns),
        "rollout/turns/max": float(max(num_turns)),
        "rollout/tool_calls/mean": _mean(num_tool_calls),
        "rollout/agent_failures": float(failures.total()),
    }
    for cause, count in sorted(failures.items()):
        metrics[f"rollout/agent_failures/{cause}"] = float(count)
    return metrics


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
    if weights:
        metrics |= Summary.merge(weights).named("rollout/is_weight")
    return metrics


def score_metrics(report: ScoreReport) -> dict[str, float]:
    """Return each score part's mean as `reward/<part>`, and failed samples by cause.

    With reward functions, a part is averaged over the samples having it; otherwise a missing part
    counts as 0.
    """
    values_of_part: dict[str, list[float]] = defaultdict(list)
    for parts_of_sample in report.parts:
        for name, value in parts_of_sample.items():
            if not isinstance(value, str):
                values_of_part[name].append(value)
    by_function = bool(report.failures)  # None for each sample that a function could score
    metrics = {}
    for name, values in sorted(values_of_part.items()):
        num_averaged = len(values) if by_function else len(report.parts)
        metrics[f"reward/{name}"] = sum(values) / num_averaged
    if by_function:
        causes = Counter(failure.cause for failure in report.failures if failure)
        metrics["reward/failed"] = float(causes.total())
        for cause, count in sorted(causes.items()):
            metrics[f"reward/failed_{cause}"] = float(count)
    return metrics


def source_metrics(report: ScoreReport, sources: Sequence[str]) -> dict[str, float]:
    """Return the means `train/<data source>/score` and `train/<data source>/<part>`.

    Failed samples are left out; a part is averaged over the samples having it. `sources` has each
    sample's data source.
    """
    values: dict[str, list[float]] = defaultdict(list)
    for row, source in enumerate(sources):
        if report.failures and report.failures[row] is not None:
            continue
        named_values: dict[str, float | str] = {"score": report.scores[row]}
        if report.parts:
            named_values |= report.parts[row]
        for name, value in named_values.items():
            if not isinstance(value, str):
                values[f"train/{source}/{name}"].append(value)
    return {name: _mean(of_samples) for name, of_samples in values.items()}


def group_metrics(report: ScoreReport, group_size: int) -> dict[str, float]:
    """Return `rollout/equal_score_groups`, the fraction of prompts with all scores equal.

    Unscored responses do not count, nor do prompts with fewer than two others; {} if no prompt
    counts.
    """
    is_scored = report.is_scored
    num_compared = 0
    for start in range(0, len(is_scored), group_size):
        num_scored = sum(is_scored[start : start + group_size])
        num_compared += num_scored > 1
    if num_compared == 0:
        return {}
    num_different = len(groups_that_differ(report.scores, is_scored, group_size))
    num_equal = num_compared - num_different
    return {"rollout/equal_score_groups": num_equal / num_compared}


def experience_metrics(reports: Sequence[ExperienceReport], kl_coef: float) -> dict[str, float]:
    """Return `critic/...` metrics: KL, scores, rewards and advantages, over all ranks.

    KL is missing if the reports have none (no reference, or measured by the update). A critic adds
    returns, values and the explained variance.
    """
    metrics = {}
    kl_of_samples = [kl for report in reports for kl in report.kl]
    if kl_of_samples:
        metrics["critic/kl"] = _mean(kl_of_samples)
    metrics["critic/kl_coeff"] = kl_coef
    num_masked = sum(report.num_masked for report in reports)
    if num_masked:
        metrics["reward/masked"] = float(num_masked)
    rejected = [report.rejected for report in reports if report.rejected is not None]
    if any(summary.count for summary in rejected):
        metrics["rollout/rejected_tokens"] = Summary.merge(rejected).mean
    for name in ("score", "rewards", "advantages", "returns", "values"):
        summaries = [getattr(report, name) for report in reports]
        if None not in summaries:  # only a critic reports returns and values
            metrics.update(Summary.merge(summaries).named(f"critic/{name}"))
    fits = [report.fit for report in reports if report.fit is not None]
    if fits:
        metrics["critic/explained_variance"] = explained_variance(fits)
    return metrics


def update_metrics(role: str, report: UpdateReport) -> dict[str, float]:
    """Return a role's mean metrics over the optimizer steps taken; NaN if all were skipped.

    Names get the prefix `role/` unless they have a slash. `role/pg_loss_abs` is the mean
    |mini-batch loss|, because the plain mean is near 0 with whitened advantages.
    """
    steps_taken = [step for step in report.steps if not step.get(SKIPPED)]
    metrics = {}
    for name in report.steps[0]:
        if name == SKIPPED:
            continue
        key = name if "/" in name else f"{role}/{name}"
        metrics[key] = _mean([step[name] for step in steps_taken if name in step])
    if "pg_loss" in report.steps[0]:
        metrics[f"{role}/pg_loss_abs"] = _mean([abs(step["pg_loss"]) for step in steps_taken])
    if SKIPPED in report.steps[0]:
        metrics[f"{role}/{SKIPPED}"] = float(len(report.steps) - len(steps_taken))
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
    num_tokens = 0
    for report in reports:
        num_tokens += sum(report.prompt_lengths) + sum(report.response_lengths)
    tokens_per_s = num_tokens / seconds
    flops_per_device = flops / seconds / num_devices
    metrics = {
        "throughput/tokens_per_s": tokens_per_s,
        "throughput/tokens_per_s_per_device": tokens_per_s / num_devices,
        "throughput/tflops_per_device": flops_per_device / 1e12,
    }
    if peak_flops:
        metrics["throughput/mfu"] = flops_per_device / peak_flops
    return metrics


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _summary(values: Sequence[int]) -> Summary:
    return Summary(len(values), float(sum(values)), float(max(values)), float(min(values)))


Phases = Mapping[str, Sequence[RoleFuture]]
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
    num_tokens = 0
    num_flops = 0
    for call in chain.from_iterable(phases.values()):
        for reply in call.replies():
            num_tokens += reply.work.tokens
            num_flops += reply.work.flops
    return Work(num_tokens, num_flops)


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
        peak_bytes = max(reply.memory for call in calls for reply in call.replies())
        metrics[f"memory/{name}"] = peak_bytes / 1024**3
        seconds_of_rank: dict[int, float] = defaultdict(float)
        for call in calls:
            if call.pool == calls[-1].pool:
                for reply in call.replies():
                    seconds_of_rank[reply.rank] += reply.seconds
        mean_s = _mean(list(seconds_of_rank.values()))
        if len(seconds_of_rank) > 1 and mean_s > 0:
            slowest = max(seconds_of_rank, key=lambda rank: seconds_of_rank[rank])
            metrics[f"skew/{name}"] = seconds_of_rank[slowest] / mean_s - 1.0
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
    for call in chain.from_iterable(phases.values()):
        for reply in call.replies():
            busy[call.pool][reply.rank] += reply.seconds
    for pool, (num_training, _) in (subpool_sizes or {}).items():
        busy[f"{pool}/train"] = busy[pool][:num_training]
        busy[f"{pool}/rollout"] = busy[pool][num_training:]
    metrics = {}
    for name, busy_of_ranks in busy.items():
        busy_fraction = sum(busy_of_ranks) / (len(busy_of_ranks) * seconds)
        metrics[f"idle/{name}"] = min(max(1.0 - busy_fraction, 0.0), 1.0)
    return metrics
