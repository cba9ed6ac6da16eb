"""Dataclasses that are sent between roles; their first axis is the sample.

A `Rows` subclass has tensor fields `[batch, ...]` and list fields of length batch. Two-dimensional
fields are right-padded along their second axis, so rows of different widths can be joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

R = TypeVar("R", bound="Rows")


@dataclass(frozen=True)
class Rows:
    """Base of all row dataclasses: selects and joins along the sample axis."""

    @property
    def num_rows(self) -> int:
        return len(getattr(self, fields(self)[0].name))

    def select(self: R, rows: Sequence[int]) -> R:
        """Return new rows with the indices `rows`, in that order; padding is not shortened."""
        places = list(rows)
        index = torch.as_tensor(places, dtype=torch.long)
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        return type(self)(
            **{
                name: c.index_select(0, index) if isinstance(c, Tensor) else [c[i] for i in places]
                for name, c in columns.items()
            }
        )

    def split(self: R, parts: int) -> list[R]:
        """Split into consecutive parts whose sizes differ by one at most; parts may be empty."""
        bounds = [i * self.num_rows // parts for i in range(parts + 1)]
        return [self.select(range(start, stop)) for start, stop in pairwise(bounds)]

    @classmethod
    def concat(cls: type[R], parts: Sequence[R]) -> R:
        """Concatenate the rows of `parts`; narrower 2-D tensors are padded with zeros on the right.

        A single part is returned as it is. Raises AssertionError for no parts.
        """
        assert parts, "Rows.concat needs at least one part"
        if len(parts) == 1:
            return parts[0]
        joined: dict[str, Any] = {}
        for name in (f.name for f in fields(cls)):
            columns = [getattr(part, name) for part in parts]
            if not isinstance(columns[0], Tensor):
                joined[name] = [item for column in columns for item in column]
                continue
            if columns[0].dim() == 2:
                width = max(column.size(1) for column in columns)
                columns = [fit_columns(column, width) for column in columns]
            joined[name] = torch.cat(columns)
        return cls(**joined)


def fit_columns(column: Tensor, width: int) -> Tensor:
    """Pad with zeros, or truncate, on the right: [batch, w] -> [batch, width]."""
    return torch.nn.functional.pad(column, (0, width - column.size(1)))


@dataclass(frozen=True)
class RoleOutput:
    """Result of a role method: rows, which stay in the workers' store, and a report for the driver.

    The report holds numbers, strings, lists and dataclasses of these; the runtime refuses tensors
    in it. The first rank of a replica writes `token_rows` to a file of its own.
    """

    rows: Rows | None = None
    report: Any = None
    token_rows: TokenRows | None = None


@dataclass(frozen=True)
class TokenLog:
    """Samples of an iteration to log token by token: each rank writes a file to the folder."""

    folder: str
    iteration: int
    sample_ids: frozenset[int]


@dataclass(frozen=True)
class TokenRows:
    """Numbers of each response token, for all samples of a rank; None for what the run lacks."""

    log: TokenLog
    sample_ids: list[int]
    lengths: Tensor  # [batch] int64, of the responses
    advantages: Tensor  # [batch, response or more], as the next two
    kl: Tensor | None
    values: Tensor | None

    def as_lists(self) -> dict[int, dict[str, list[float]]]:
        """Return sample id -> {"advantage" | "kl" | "value": one number per response token}.

        Only for this rank's samples in `log.sample_ids`.
        """
        named = {"advantage": self.advantages, "kl": self.kl, "value": self.values}
        columns = {name: column for name, column in named.items() if column is not None}
        lengths = self.lengths.tolist()
        return {
            sample_id: {name: c[row, : lengths[row]].tolist() for name, c in columns.items()}
            for row, sample_id in enumerate(self.sample_ids)
            if sample_id in self.log.sample_ids
        }


@dataclass(frozen=True)
class Prompts(Rows):
    """Prompts that the driver sends to one data-parallel rank."""

    sample_ids: list[int]  # unique within a run: seeds of the sampled tokens derive from them
    token_ids: list[Any]  # numpy int64 arrays, one per prompt, no padding
    ground_truths: list[str]
    data_sources: list[str]
    responses: list[list[int]]  # empty, or the tokens to use in place of generated ones
    extra_infos: list[dict[str, Any]] = field(default_factory=list)  # other columns; absent = none

    def __post_init__(self) -> None:
        _fill_extra_infos(self)


@dataclass(frozen=True)
class Rollouts(Rows):
    """Prompts with their responses.

    A response is everything after the prompt: tokens that the policy sampled and, between them,
    tokens that it was given (the output of a tool). Only sampled tokens are trained on.
    """

    sample_ids: list[int]
    prompt_ids: Tensor  # [batch, prompt] int64, right-padded with 0
    prompt_lengths: Tensor  # [batch] int64
    response_ids: Tensor  # [batch, response] int64, right-padded with 0, EOS included
    response_mask: Tensor  # [batch, response] bool, True = a token of the response, False = padding
    trained_mask: Tensor  # [batch, response] bool, True = trained; within response_mask
    has_eos: Tensor  # [batch] bool, True = the response ends with an EOS or a stop string
    rollout_log_probs: Tensor  # [batch, response] fp32, unfiltered, 0 where not trained
    ground_truths: list[str]
    data_sources: list[str]
    # [batch, response] int32: number of actor updates before the weights that made each token;
    # 0 where padded
    weights_version: Tensor
    extra_infos: list[dict[str, Any]] = field(default_factory=list)  # as in Prompts

    def __post_init__(self) -> None:
        _fill_extra_infos(self)
        outside = self.trained_mask & ~self.response_mask
        assert not bool(outside.any()), "only tokens of a response can be trained on"

    @property
    def response_lengths(self) -> Tensor:
        """Number of tokens of each response: [batch] int64, at least 1."""
        return self.response_mask.sum(1)

    def prompt_tokens(self) -> list[list[int]]:
        """Return the token ids of each prompt, without padding."""
        pairs = zip(self.prompt_ids, self.prompt_lengths.tolist(), strict=True)
        return [ids[:length].tolist() for ids, length in pairs]

    def response_tokens(self) -> list[list[int]]:
        """Return the token ids of each response, without padding."""
        pairs = zip(self.response_ids, self.response_lengths.tolist(), strict=True)
        return [ids[:length].tolist() for ids, length in pairs]


def _fill_extra_infos(rows: Prompts | Rollouts) -> None:
    if not rows.extra_infos:
        object.__setattr__(rows, "extra_infos", [{} for _ in rows.sample_ids])


@dataclass(frozen=True)
class LogProbs(Rows):
    log_probs: Tensor  # [batch, response] fp32, 0 where not trained


@dataclass(frozen=True)
class LogProbsWithKl(LogProbs):
    kl: Tensor  # [batch, response] fp32, over the whole vocabulary, 0 where not trained


@dataclass(frozen=True)
class Values(Rows):
    values: Tensor  # [batch, response + 1] fp32, 0 where not read (`algorithms.slots`)


@dataclass(frozen=True)
class Scores(Rows):
    scores: Tensor  # [batch] fp32

    @property
    def is_scored(self) -> Tensor:
        """[batch] bool, False = no score for a cause that is not the response's; not trained."""
        return torch.ones(len(self.scores), dtype=torch.bool)


@dataclass(frozen=True)
class RuleScores(Scores):
    """Scores of functions and rules."""

    parts: list[dict[str, float]]  # of each sample, for the log
    failures: list[Any]  # of each sample, None if scored (`roles.reports.FailedSample`)

    @property
    def is_scored(self) -> Tensor:
        return torch.tensor([not (f and f.is_outside) for f in self.failures], dtype=torch.bool)


@dataclass(frozen=True)
class ExperienceInputs:
    """What advantages and returns are computed from: rows of the same samples in the same order.

    The driver fills it with references to rows (`cluster.refs.as_rows_field`).
    """

    rollouts: Rollouts
    old: LogProbs | None  # recomputed; None = those of the rollout, or of the update, are used
    ref: LogProbs | None  # None without a reference, whose KL then counts as 0
    scores: Scores
    values: Values | None  # None without a critic
    greedy: Rollouts | None  # ReMax: the greedy response to the prompt of each sample
    greedy_scores: Scores | None
    kl_coef: float
    slot_limit: int  # largest number of slots of a response (`algorithms.slots.value_mask`)
    token_log: TokenLog | None = None  # samples to log token by token


@dataclass(frozen=True)
class Experience(Rows):
    """Training data of actor and critic. Slots: those of `algorithms.slots`.

    Fields that a run does not need have no columns: returns, values and value_mask without a
    critic, ref_log_probs unless the loss compares with the reference.
    """

    # [batch, response] fp32, 0 where masked; losses of pairs: 1 = preferred response, -1 = other
    advantages: Tensor
    trained_mask: Tensor  # [batch, response] bool, True = token that is trained
    old_log_probs: Tensor  # [batch, response] fp32; no columns = the update uses its own log-probs
    ref_log_probs: Tensor  # [batch, response] fp32
    returns: Tensor  # [batch, slots] fp32
    values: Tensor  # [batch, slots] fp32, the critic's before the update
    value_mask: Tensor  # [batch, slots] bool, True = slot whose value is trained
