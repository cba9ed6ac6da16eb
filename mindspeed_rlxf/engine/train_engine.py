"""The interface between a role and the engine that computes with its model.

A role knows neither parallel groups nor schedules nor output weights: it passes rows and gets their
log-probs, values or scores, or it passes the loss of an optimizer step. `MegatronEngine` implements
the interface. All ranks of the role must call a method together, unless it names other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

from torch import Tensor

from mindspeed_rlxf.algorithms.losses import LossOutput
from mindspeed_rlxf.data.batch import LogProbs, LogProbsWithKl, Rollouts, Scores, Values
from mindspeed_rlxf.weights.state_files import Loaded


class Part(Enum):
    """A part of an engine's memory on the device, which may be moved to the host."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"  # moments, and fp32 weights where the model's are bf16


class TokenLogProbs(NamedTuple):
    """Log-probs and entropies of a micro-batch's trained tokens, row after row, [tokens] fp32."""

    log_probs: Tensor
    entropy: Tensor


TokenLoss: TypeAlias = Callable[[list[int], TokenLogProbs], LossOutput]
"""(rows of the micro-batch, log-probs of its trained tokens) -> loss."""

SlotLoss: TypeAlias = Callable[[list[int], Tensor], LossOutput]
"""(rows of the micro-batch, values of its trained slots, row after row, [slots] fp32) -> loss."""


@dataclass(frozen=True)
class PolicyStep:
    """The loss of an optimizer step of a policy. temperature: divides the logits"""

    loss: TokenLoss
    temperature: float


@dataclass(frozen=True)
class ValueStep:
    """The loss of an optimizer step of a value model.

    slots: [all rows, slots] bool, True = the value of the slot is trained
    """

    loss: SlotLoss
    slots: Tensor


class TrainEngine(Protocol):
    """Trains a model and computes with it.

    Results have the order of the rows. They are None on all ranks of a replica but its leader.
    """

    @property
    def is_leader(self) -> bool:
        """Whether the results of this rank are used for its replica."""

    def log_probs(self, rollouts: Rollouts, temperature: float) -> LogProbs | None:
        """Return the log-probs of the trained tokens of the responses, 0 elsewhere."""

    def log_probs_with_kl(
        self, rollouts: Rollouts, temperature: float, policy: Any
    ) -> LogProbsWithKl | None:
        """Return the trained tokens' log-probs, and KL(policy || this engine) over the vocabulary.

        policy: an engine of the same class and layout in this process
        """

    def values(self, rollouts: Rollouts) -> Values | None:
        """Return the values of the slots that `algorithms.slots.readable_slots` marks."""

    def scores(self, rollouts: Rollouts) -> Scores | None:
        """Return the score at the last token of each response."""

    def micro_batches(self, rollouts: Rollouts, rows: Sequence[int]) -> Sequence[Any]:
        """Return micro-batches of the given rows, in the form that `train_step` takes."""

    def train_step(
        self, micro_batches: Sequence[Any], step: PolicyStep | ValueStep
    ) -> dict[str, float]:
        """Take an optimizer step; return `grad_norm`, on the last pipeline stage the metrics too.

        The metrics are of the mini-batch of all replicas. Raises FloatingPointError, before any
        weight changes, where the loss or the gradient is NaN or infinite, unless
        `training.nan_policy` skips the step.
        """

    def end_iteration(self) -> float:
        """Advance the learning-rate schedule; return the rate of the iteration that ends."""

    def sum_over_replicas(self, tensor: Tensor) -> Tensor:
        """Return the sum of a small CPU tensor over the data-parallel ranks, as a new tensor."""

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight as (Hugging Face name, whole tensor on the device), on every rank.

        For ranks that only generate it has the order of `models.parameters.hf_shapes`.
        """

    def export(self, hf_folder: Path | None, megatron_folder: Path | None) -> None:
        """Write the weights as a Hugging Face folder and as a Megatron checkpoint; None = not.

        Raises OSError where they cannot be written.
        """

    def offload(self) -> None:
        """Move the parts that the role's key `offload` names to host memory.

        Each method brings the parts that it needs back to the device.
        """

    def onload(self) -> None:
        """Bring all parts back to the device."""

    def holding(self, *parts: Part) -> AbstractContextManager[None]:
        """Return a context manager that keeps parts on the device, for code outside the engine."""

    def begin_save(self, folder: Path) -> None:
        """Copy the training state to the host, and start to write it into `folder`."""

    def end_save(self) -> float:
        """Wait for the files of all ranks; return the seconds that the slowest rank needed.

        Raises OSError on all ranks where one could not write.
        """

    def load_state(self, folder: Path) -> Loaded:
        """Load a training state; return the problem of any rank, on every rank, or the success."""
