"""The interface between a role and the engine that computes with its model.

A role knows no parallel groups, schedules or output weights: it passes rows and gets their
log-probs, values or scores, or it passes an optimizer step's loss. `MegatronEngine` implements the
interface. All ranks in the role must call a method together, unless it names other ranks.
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


class MemoryKind(Enum):
    """A kind of an engine's device memory, which may move to the host."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"  # moments, and fp32 weights where the model's are bf16


class TokenLogProbs(NamedTuple):
    """Log-probs and entropies for a micro-batch's trained tokens, row after row, [tokens] fp32."""

    log_probs: Tensor
    entropy: Tensor


TokenLoss: TypeAlias = Callable[[list[int], TokenLogProbs], LossOutput]
"""(rows of the micro-batch, log-probs of its trained tokens) -> loss."""

SlotLoss: TypeAlias = Callable[[list[int], Tensor], LossOutput]
"""(rows of the micro-batch, values of its trained slots, row after row, [slots] fp32) -> loss."""


@dataclass(frozen=True)
class PolicyStep:
    """The loss in a policy's optimizer step."""

    loss: TokenLoss
    temperature: float  # divides the logits
    trains_entropy: bool = True  # whether the loss needs the entropies' gradients


@dataclass(frozen=True)
class ValueStep:
    """The loss in a value model's optimizer step."""

    loss: SlotLoss
    slots: Tensor  # [all rows, slots] bool, True for slots whose value is trained


class TrainEngine(Protocol):
    """Trains a model and computes with it.

    Results follow row order. They are None on all ranks in a replica but its leader.
    """

    @property
    def is_leader(self) -> bool:
        """Whether this rank's results are used for its replica."""

    def log_probs(self, rollouts: Rollouts, temperature: float) -> LogProbs | None:
        """Return log-probs for the trained response tokens, 0 elsewhere."""

    def log_probs_with_kl(
        self, rollouts: Rollouts, temperature: float, policy: Any
    ) -> LogProbsWithKl | None:
        """Return the trained tokens' log-probs, and KL(policy || this engine) over the vocabulary.

        The policy engine has the same class and layout, and lives in this process. This engine
        computes without adapters, so both may be one.
        """

    def without_adapters(self) -> AbstractContextManager[None]:
        """Return a context in which this engine computes with the weights that it loaded alone.

        Without adapters it changes nothing.
        """

    def values(self, rollouts: Rollouts) -> Values | None:
        """Return values for the slots marked by `algorithms.slots.readable_slots`."""

    def scores(self, rollouts: Rollouts) -> Scores | None:
        """Return the score at each response's last token."""

    def micro_batches(self, rollouts: Rollouts, rows: Sequence[int]) -> Sequence[Any]:
        """Return micro-batches with the given rows, in the form `train_step` takes."""

    def train_step(
        self, micro_batches: Sequence[Any], step: PolicyStep | ValueStep
    ) -> dict[str, float]:
        """Take an optimizer step; return `grad_norm`, on the last pipeline stage the metrics too.

        The metrics cover all replicas' mini-batch. Raises FloatingPointError, before any weight
        changes, if the loss or the gradient is NaN or infinite, unless `training.nan_policy` skips
        the step.
        """

    def end_iteration(self) -> float:
        """Advance the learning-rate schedule; return the ending iteration's rate."""

    def sum_over_replicas(self, tensor: Tensor) -> Tensor:
        """Return a small CPU tensor's sum over the data-parallel ranks, as a new tensor."""

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight but adapters as (Hugging Face name, whole device tensor).

        On every rank. Adapters are not merged either: in bf16 most of a small update would be lost
        in the rounding of the sum. Ranks that only generate rely on the order of
        `models.parameters.hf_shapes`.
        """

    def adapter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each adapter's A and B like `hf_tensors`, by PEFT's names; none without adapters.

        Ranks that only generate rely on the order of `models.adapter_parameters.adapter_shapes`.
        """

    def changing_weights(self) -> AbstractContextManager[Sequence[Tensor]]:
        """Return a context with this rank's parts of the weights, which it may change in place.

        They are all that `hf_tensors` is made of, and on the device inside the block.
        """

    def export(
        self,
        hf_folder: Path | None,
        megatron_folder: Path | None,
        adapter_folder: Path | None = None,
    ) -> None:
        """Write a Hugging Face folder, a Megatron checkpoint, adapters for PEFT; None skips one.

        The first two have the adapters merged. Raises OSError if they cannot be written.
        """

    def offload(self) -> None:
        """Move the kinds of memory named by the role's `offload` key to host memory.

        Each method brings the memory it needs back to the device.
        """

    def onload(self) -> None:
        """Bring all memory back to the device."""

    def holding(self, *kinds: MemoryKind) -> AbstractContextManager[None]:
        """Return a context manager that keeps memory on the device, for code outside the engine."""

    def begin_save(self, folder: Path) -> None:
        """Copy the training state to the host, and start writing it into `folder`."""

    def end_save(self) -> float:
        """Wait for all ranks' files; return the slowest rank's seconds.

        Raises OSError on all ranks if one could not write.
        """

    def load_state(self, folder: Path) -> Loaded:
        """Load a training state; return any rank's problem, on every rank, or the success."""
