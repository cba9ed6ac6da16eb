"""The interface between a role and the engine that trains its model.

A role knows neither parallel groups nor schedules nor output weights: it passes rows and gets their
log-probs, values or scores, or it passes the loss of a step. `MegatronEngine` implements it; every
method is a collective over the ranks of the role.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

from torch import Tensor

from mindspeed_rlxf.data.batch import LogProbs, LogProbsWithKl, Rollouts, Scores, Values
from mindspeed_rlxf.weights.state_files import Loaded, Written


class Part(Enum):
    """What an engine holds on the device."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"  # moments, and fp32 weights where the model's are bf16


class TokenLogProbs(NamedTuple):
    """Two [tokens] fp32 tensors of the trained tokens of a micro-batch, row after row."""

    log_probs: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class Mean:
    """A metric of one micro-batch: a detached sum, and the weight to divide it by."""

    total: Tensor  # scalar fp64; fp32 on an NPU, which has no fp64
    weight: int

    @classmethod
    def of(cls, values: Tensor, weight: int, scale: float = 1.0) -> Mean:
        """Sum `values`, of any shape, multiply by `scale`, and detach."""
        return cls(values.detach().double().sum() * scale, weight)


@dataclass(frozen=True)
class LossOutput:
    """Loss of one micro-batch, as a sum: the engine divides by the global weight.

    loss:    scalar with gradient, the sum over tokens or responses
    weight:  number of tokens or responses in the micro-batch, or 1 for a mean of means
    metrics: by name; reported is the sum over all replicas divided by the sum of the weights
    """

    loss: Tensor
    weight: int
    metrics: dict[str, Mean]


TokenLoss: TypeAlias = Callable[[list[int], TokenLogProbs], LossOutput]
"""(rows of the micro-batch, log-probs of their trained tokens) -> loss."""

SlotLoss: TypeAlias = Callable[[list[int], Tensor], LossOutput]
"""(rows of the micro-batch, values of their slots, row after row, [slots] fp32) -> loss."""


@dataclass(frozen=True)
class PolicyStep:
    """One optimizer step of a policy. temperature: divides the logits."""

    loss: TokenLoss
    temperature: float


@dataclass(frozen=True)
class ValueStep:
    """One optimizer step of a value model. slots: [all rows, slots] bool, True = trained"""

    loss: SlotLoss
    slots: Tensor


class TrainEngine(Protocol):
    """Trains a model and computes with it.

    Results have the order of the rows, and are None on ranks that do not lead their replica.
    """

    @property
    def is_leader(self) -> bool:
        """Whether the results of this rank are used for its replica."""

    def log_probs(self, rollouts: Rollouts, temperature: float) -> LogProbs | None:
        """Log-probs of the trained tokens of the responses."""

    def log_probs_with_kl(
        self, rollouts: Rollouts, temperature: float, policy: Any
    ) -> LogProbsWithKl | None:
        """Log-probs of the trained tokens, and KL(policy || this) over the vocabulary.

        policy: an engine of this class and layout in the same process
        """

    def values(self, rollouts: Rollouts) -> Values | None:
        """Values of the slots that may be read (`algorithms.slots.readable_slots`)."""

    def scores(self, rollouts: Rollouts) -> Scores | None:
        """Scores at the last token of each response."""

    def micro_batches(self, rollouts: Rollouts, rows: Sequence[int]) -> Sequence[Any]:
        """Micro-batches of the given rows, in the form that this engine computes with."""

    def train_step(
        self, micro_batches: Sequence[Any], step: PolicyStep | ValueStep
    ) -> dict[str, float]:
        """One optimizer step; metrics over the mini-batch of all replicas, and `grad_norm`.

        Errors: FloatingPointError before any weight changes, where a number is NaN or infinite.
        """

    def end_iteration(self) -> float:
        """Advance the learning-rate schedule; returns the rate that the iteration used."""

    def sum_over_replicas(self, tensor: Tensor) -> Tensor:
        """The sum of a small CPU tensor over the data-parallel ranks."""

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight as (Hugging Face name, whole tensor on the device), one at a time."""

    def export(self, hf_folder: Path | None, megatron_folder: Path | None) -> None:
        """Write the weights in each format that has a folder."""

    def offload(self) -> None:
        """Move the parts that the configuration names (`offload`) to host memory.

        Every method brings back the parts that it needs.
        """

    def onload(self) -> None:
        """Bring everything back to the device."""

    def holding(self, *parts: Part) -> AbstractContextManager[None]:
        """Keep parts on the device inside the block, for code that reads them from outside."""

    def begin_save(self, folder: Path) -> None:
        """Copy the training state to the host and start writing it."""

    def end_save(self) -> Written:
        """Wait for the files of all ranks."""

    def load_state(self, folder: Path) -> Loaded:
        """Load a training state; if one rank cannot, all ranks report the problem."""
