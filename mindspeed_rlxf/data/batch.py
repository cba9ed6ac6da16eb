"""Dataclasses exchanged between roles, with the sample as first axis.

A `Rows` subclass has tensor fields `[batch, ...]` and list fields with batch entries. Matrices are
right-padded along the second axis, so rows with different widths can be concatenated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import chain, pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

R = TypeVar("R", bound="Rows")


@dataclass(frozen=True)
class Rows:
    """Base class: selects, splits and concatenates along the sample axis."""

    @property
    def num_rows(self) -> int:
        """Number of samples."""
        return len(getattr(self, fields(self)[0].name))

    def select(self: R, rows: Sequence[int]) -> R:
        """Return new rows in the order given by the indices `rows`; padding is not shortened."""
        indices = list(rows)
        index_tensor = torch.as_tensor(indices, dtype=torch.long)
        selected: dict[str, Any] = {}
        for column_field in fields(self):
            column = getattr(self, column_field.name)
            if isinstance(column, Tensor):
                selected[column_field.name] = column.index_select(0, index_tensor)
            else:
                selected[column_field.name] = [column[i] for i in indices]
        return type(self)(**selected)

    def split(self: R, num_batches: int) -> list[R]:
        """Split into consecutive batches whose sizes differ by at most one; some may be empty."""
        bounds = [i * self.num_rows // num_batches for i in range(num_batches + 1)]
        return [self.select(range(start, stop)) for start, stop in pairwise(bounds)]

    @classmethod
    def concat(cls: type[R], batches: Sequence[R]) -> R:
        """Concatenate at least one batch, zero-padding narrower 2-D tensors on the right."""
        assert batches, "Rows.concat needs at least one batch"
        if len(batches) == 1:
            return batches[0]
        joined: dict[str, Any] = {}
        for column_field in fields(cls):
            name = column_field.name
            columns = [getattr(batch, name) for batch in batches]
            if not isinstance(columns[0], Tensor):
                joined[name] = list(chain(*columns))
                continue
            if columns[0].dim() == 2:
                width = max(column.size(1) for column in columns)
                columns = [fit_columns(column, width) for column in columns]
            joined[name] = torch.cat(columns)
        return cls(**joined)


def fit_columns(column: Tensor, width: int) -> Tensor:
    """Zero-pad or truncate on the right: [batch, w] -> [batch, width]."""
    return torch.nn.functional.pad(column, (0, width - column.size(1)))


@dataclass(frozen=True)
class RoleOutput:
    """Result of a role method: rows, kept in the workers' store, and a report sent to the driver.

    The report holds numbers, strings, lists and dataclasses of them; the runtime refuses tensors.
    Each replica's first rank writes `token_rows` to its own file.
    """

    rows: Rows | None = None
    report: Any = None
    token_rows: TokenRows | None = None


@dataclass(frozen=True)
class TokenLog:
    """Samples to log token by token in one iteration; each rank writes a file to the folder."""

    folder: str
    iteration: int
    sample_ids: frozenset[int]


@dataclass(frozen=True)
class TokenRows:
    """Per-token values for all samples on a rank; None for values the run does not compute."""

    log: TokenLog
    sample_ids: list[int]
    lengths: Tensor  # [batch] int64, response lengths
    advantages: Tensor  # [batch, response or more], like the next two
    kl: Tensor | None
    values: Tensor | None

    def as_lists(self) -> dict[int, dict[str, list[float]]]:
        """Return sample id -> {"advantage" | "kl" | "value": one number per response token}.

        Only for this rank's samples in `log.sample_ids`.
        """
        columns = {"advantage": self.advantages, "kl": self.kl, "value": self.values}
        lists_of_sample: dict[int, dict[str, list[float]]] = {}
        for row, (sample_id, length) in enumerate(
            zip(self.sample_ids, self.lengths.tolist(), strict=True)
        ):
            if sample_id not in self.log.sample_ids:
                continue
            lists_of_sample[sample_id] = {}
            for name, column in columns.items():
                if column is not None:
                    lists_of_sample[sample_id][name] = column[row, :length].tolist()
        return lists_of_sample


@dataclass(frozen=True)
class Prompts(Rows):
    """Prompts sent by the driver to one data-parallel rank."""

    sample_ids: list[int]  # unique within a run; sampling seeds derive from them
    token_ids: list[Any]  # numpy int64 arrays, one per prompt, no padding
    ground_truths: list[str]
    data_sources: list[str]
    responses: list[list[int]]  # empty, or tokens used instead of generating
    extra_infos: list[dict[str, Any]] = field(default_factory=list)  # other columns; absent = none
    messages: list[list[dict[str, Any]]] = field(default_factory=list)  # `Prompt.messages`

    def __post_init__(self) -> None:
        _fill_columns(self)


@dataclass(frozen=True)
class Rollouts(Rows):
    """Prompts with their responses.

    A response is everything after the prompt: tokens sampled by the policy and, between them, those
    given to it (a tool's output). Only sampled tokens are trained.

    Two samples, with EOS 2; the second response was truncated, and its token 4 is of a tool:

        sample_ids         [0, 1]
        prompt_ids         [[5, 6, 7], [5, 0, 0]]
        prompt_lengths     [3, 1]
        response_ids       [[8, 2, 0], [9, 4, 8]]
        response_mask      [[True, True, False], [True, True, True]]
        trained_mask       [[True, True, False], [True, False, True]]
        has_eos            [True, False]
        rollout_log_probs  [[-0.1, -0.3, 0.0], [-0.7, 0.0, -0.2]]
    """

    sample_ids: list[int]
    prompt_ids: Tensor  # [batch, prompt] int64, right-padded with 0
    prompt_lengths: Tensor  # [batch] int64
    response_ids: Tensor  # [batch, response] int64, right-padded with 0, EOS included
    response_mask: Tensor  # [batch, response] bool, True = response token, False = padding
    trained_mask: Tensor  # [batch, response] bool, True = trained; within response_mask
    has_eos: Tensor  # [batch] bool, True = the response ends with an EOS or a stop string
    rollout_log_probs: Tensor  # [batch, response] fp32, unfiltered, 0 where not trained
    ground_truths: list[str]
    data_sources: list[str]
    # [batch, response] int32: actor updates before the weights that sampled the token; 0 = padding
    weights_version: Tensor
    extra_infos: list[dict[str, Any]] = field(default_factory=list)  # as in Prompts
    messages: list[list[dict[str, Any]]] = field(default_factory=list)  # as in Prompts

    def __post_init__(self) -> None:
        _fill_columns(self)
        outside = self.trained_mask & ~self.response_mask
        assert not bool(outside.any()), "only tokens of a response can be trained on"

    @property
    def response_lengths(self) -> Tensor:
        """Tokens per response: [batch] int64, at least 1."""
        return self.response_mask.sum(1)

    def prompt_tokens(self) -> list[list[int]]:
        """Return each prompt's token ids without padding."""
        pairs = zip(self.prompt_ids, self.prompt_lengths.tolist(), strict=True)
        return [ids[:length].tolist() for ids, length in pairs]

    def response_tokens(self) -> list[list[int]]:
        """Return each response's token ids without padding."""
        pairs = zip(self.response_ids, self.response_lengths.tolist(), strict=True)
        return [ids[:length].tolist() for ids, length in pairs]


def _fill_columns(rows: Prompts | Rollouts) -> None:
    if not rows.extra_infos:
        object.__setattr__(rows, "extra_infos", [{} for _ in rows.sample_ids])
    if not rows.messages:
        object.__setattr__(rows, "messages", [[] for _ in rows.sample_ids])


@dataclass(frozen=True)
class LogProbs(Rows):
    """Log-probs of the response tokens."""

    log_probs: Tensor  # [batch, response] fp32, 0 where not trained


@dataclass(frozen=True)
class LogProbsWithKl(LogProbs):
    """Log-probs with the exact KL to the reference."""

    kl: Tensor  # [batch, response] fp32, over the whole vocabulary, 0 where not trained


@dataclass(frozen=True)
class Values(Rows):
    """Value estimates."""

    values: Tensor  # [batch, response + 1] fp32, 0 where not read (`algorithms.slots`)


@dataclass(frozen=True)
class Scores(Rows):
    """One score per response."""

    scores: Tensor  # [batch] fp32

    @property
    def is_scored(self) -> Tensor:
        """[batch] bool; False = scoring failed through no fault of the response: not trained."""
        return torch.ones(len(self.scores), dtype=torch.bool)


@dataclass(frozen=True)
class RuleScores(Scores):
    """Scores from functions and rules."""

    parts: list[dict[str, float | str]]  # per sample, for the log
    failures: list[Any]  # per sample, None if scored (`roles.reports.FailedSample`)

    @property
    def is_scored(self) -> Tensor:
        """See `Scores`."""
        is_outside = [failure is not None and failure.is_outside for failure in self.failures]
        return ~torch.tensor(is_outside, dtype=torch.bool)


@dataclass(frozen=True)
class ExperienceInputs:
    """Inputs for advantages and returns: rows for the same samples in the same order.

    The driver fills it with references to rows (`cluster.refs.as_rows_field`).
    """

    rollouts: Rollouts
    old: LogProbs | None  # recomputed; None = use the rollout's or the update's
    ref: LogProbs | None  # None without a reference: KL counts as 0
    scores: Scores
    values: Values | None  # None without a critic
    greedy: Rollouts | None  # ReMax: greedy response to each prompt
    greedy_scores: Scores | None
    kl_coef: float
    slot_limit: int  # most slots per response (`algorithms.slots.value_mask`)
    token_log: TokenLog | None = None  # samples to log token by token


@dataclass(frozen=True)
class Experience(Rows):
    """Training data for actor and critic; `algorithms.slots` defines slots.

    Unneeded fields have no columns: returns, values and value_mask without a critic, ref_log_probs
    unless the loss compares with the reference.
    """

    # [batch, response] fp32, 0 where masked; pair losses: 1 = preferred response, -1 = other
    advantages: Tensor
    trained_mask: Tensor  # [batch, response] bool, True = trained
    old_log_probs: Tensor  # [batch, response] fp32; no columns = the update's own
    ref_log_probs: Tensor  # [batch, response] fp32
    returns: Tensor  # [batch, slots] fp32
    values: Tensor  # [batch, slots] fp32, the critic's before the update
    value_mask: Tensor  # [batch, slots] bool, True = value is trained
