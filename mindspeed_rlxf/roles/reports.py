"""Reports from role methods to the driver: plain Python values without tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from mindspeed_rlxf.data.agent_record import AgentRecord
from mindspeed_rlxf.rollout.sampling import Sampling


@dataclass(frozen=True)
class Summary:
    """Count, sum, maximum and minimum over many elements; summaries can be merged."""

    count: int
    total: float
    largest: float
    smallest: float

    @classmethod
    def of(cls, values: Tensor) -> Summary:
        """Summarize all elements in a tensor, which is on the host (an NPU lacks fp64)."""
        if not values.numel():
            return cls(0, 0.0, -math.inf, math.inf)
        wide = values.double()
        return cls(wide.numel(), float(wide.sum()), float(wide.max()), float(wide.min()))

    @classmethod
    def merge(cls, summaries: Iterable[Summary]) -> Summary:
        """Return one summary for everything that `summaries` (one or more) cover."""
        summaries = list(summaries)
        return cls(
            sum(summary.count for summary in summaries),
            sum(summary.total for summary in summaries),
            max(summary.largest for summary in summaries),
            min(summary.smallest for summary in summaries),
        )

    @property
    def mean(self) -> float:
        """Mean over all elements."""
        return self.total / self.count

    def named(self, prefix: str) -> dict[str, float]:
        """Return metrics `prefix/mean`, `prefix/max` and `prefix/min`, NaN if empty."""
        names = f"{prefix}/mean", f"{prefix}/max", f"{prefix}/min"
        if not self.count:
            return dict.fromkeys(names, math.nan)
        return dict(zip(names, (self.mean, self.largest, self.smallest), strict=True))


@dataclass(frozen=True)
class GenerateReport:
    """A replica's generation: lists with one entry per sample, and GenerationStats counts."""

    prompt_lengths: list[int]
    response_lengths: list[int]
    has_eos: list[bool]
    prompt_tokens: int
    decoded_tokens: int
    sampled_tokens: int
    sync_s: float  # seconds that the rollout waited for its weights
    device: str = ""  # model of the device, empty on CPU
    # Weights versions of each sample's tokens: the oldest, and the mean over the tokens.
    oldest_versions: list[int] = field(default_factory=list)
    mean_versions: list[float] = field(default_factory=list)
    # What agents have left of their conversations, None for samples without an agent.
    records: list[AgentRecord | None] = field(default_factory=list)
    # Of each sample's agent; None = it has not failed.
    agent_failures: list[FailedSample | None] = field(default_factory=list)


class EndedResponse(NamedTuple):
    """A response that has ended, named by its sample."""

    sample_id: int
    sampling: Sampling
    response_length: int  # tokens
    has_eos: bool


@dataclass(frozen=True)
class SliceReport:
    """What a slice did on a replica: the responses that ended, and how many have not.

    After `server_has_failed` the others go on once the weights are sent again.
    """

    ended: list[EndedResponse]
    unfinished: int
    server_has_failed: bool = False


@dataclass(frozen=True)
class ResponseLengths:
    """Lengths in tokens, one entry per sample."""

    prompts: list[int]
    responses: list[int]
    has_eos: list[bool]


@dataclass(frozen=True)
class LogProbReport:
    """Recomputed log-probs compared with the rollout's, over tokens.

    `gap` is |log-prob difference|, and `weight` the truncated probability ratio; None without
    `rollout_is_threshold`.
    """

    gap: Summary
    weight: Summary | None = None


@dataclass(frozen=True)
class FailedSample:
    """A sample that could not be scored; `cause` and `is_outside` as in `outcome.Cause`.

    `details` are lines with the sample's prompt, response and ground truth, the reward function and
    its traceback; only a rank's first failure has them.
    """

    sample_id: int
    cause: str
    message: str
    is_outside: bool = False
    details: str = ""


@dataclass(frozen=True)
class ScoreReport:
    """Scores before any penalty; lists with one entry per sample on the rank, or empty."""

    scores: list[float]
    # Named parts of a rule's reward; text is for samples.jsonl alone.
    parts: list[dict[str, float | str]] = field(default_factory=list)
    # None = scored; [] where scoring cannot fail for a single sample
    failures: list[FailedSample | None] = field(default_factory=list)
    answers: list[str | None] = field(default_factory=list)  # bounded in length; of a validation

    @property
    def is_scored(self) -> list[bool]:
        """Per sample: False if an outside failure masks it out."""
        if not self.failures:
            return [True] * len(self.scores)
        return [not (failure and failure.is_outside) for failure in self.failures]


def failed_by_agent(sample_id: int, record: AgentRecord | None) -> FailedSample | None:
    """Return the failure of a sample's agent, None if there is none."""
    if record is None or record.failure is None:
        return None
    failure = record.failure
    named = f"agent {record.agent}: {failure.message}"
    return FailedSample(sample_id, f"agent_{failure.cause}", named, True, failure.details)


def value_fit(returns: Tensor, values: Tensor) -> list[float]:
    """Return the per-rank sums for `explained_variance` over slots on the host.

    These are the slot count, and fp64 sums: returns R, R^2, errors R - V, and (R - V)^2.
    """
    wide = returns.double()
    errors = wide - values.double()
    sums = (wide.sum(), (wide**2).sum(), errors.sum(), (errors**2).sum())
    return [wide.numel(), *map(float, sums)]


def explained_variance(fits: Sequence[Sequence[float]]) -> float:
    """Return 1 - Var(R - V) / Var(R), where `fits` are the sums of `value_fit` of all ranks.

    NaN without slots or if Var(R) <= 1e-12.
    """
    n, *sums = (sum(column) for column in zip(*fits, strict=True))
    if n == 0:
        return math.nan
    mean, square, error, error_square = (total / n for total in sums)
    variance = square - mean**2
    unexplained = error_square - error**2
    return 1.0 - unexplained / variance if variance > 1e-12 else math.nan


@dataclass(frozen=True)
class ExperienceReport:
    """A replica's experience.

    Attributes:
        kl: Mean KL per token of each sample with trained tokens; empty if not computed.
        score: Over samples, like `rewards`.
        rewards: Response totals.
        advantages: Over tokens.
        returns: Over slots, like `values`; both are None without a critic.
        values: The critic's values.
        fit: `value_fit`; None without a critic.
        num_masked: Samples that could not be scored; only `kl` counts them.
        rejected: Over tokens, 1 where `rollout_rejection` leaves one out; None without it.
    """

    kl: list[float]
    score: Summary
    rewards: Summary
    advantages: Summary
    returns: Summary | None
    values: Summary | None
    fit: list[float] | None = None  # of `value_fit`
    num_masked: int = 0
    rejected: Summary | None = None


@dataclass(frozen=True)
class UpdateReport:
    """Each optimizer step's metrics, averaged over all replicas, and the learning rate."""

    steps: list[dict[str, float]]
    lr: float


@dataclass(frozen=True)
class SampleText:
    """One sample's token ids for the sample log, and its (min, max) weights version.

    `record` is what an agent has left, if one led the sample.
    """

    sample_id: int
    prompt_ids: list[int]
    response_ids: list[int]
    weights_version: tuple[int, int]
    record: AgentRecord | None = None
