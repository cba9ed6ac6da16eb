"""What all training engines have in common: reading outputs, moving memory, counting work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rlxf.algorithms.losses import LossOutput
from mindspeed_rlxf.algorithms.slots import readable_slots
from mindspeed_rlxf.config.schema import LoraConfig, RoleConfig
from mindspeed_rlxf.data.batch import LogProbs, LogProbsWithKl, Rollouts, Scores, Values
from mindspeed_rlxf.engine import flop_counter, offload
from mindspeed_rlxf.engine.collective_errors import fail_together, gather_all
from mindspeed_rlxf.engine.head_outputs import (
    OutputHead,
    read_log_probs,
    read_log_probs_and_entropies,
    read_log_probs_and_kl,
    read_scores,
    read_states,
    read_values,
)
from mindspeed_rlxf.engine.micro_batch import MicroBatch
from mindspeed_rlxf.engine.offload import Offload
from mindspeed_rlxf.engine.outputs import average_metrics, scatter_rows
from mindspeed_rlxf.engine.step_guard import SkippedSteps, StepResult
from mindspeed_rlxf.engine.train_engine import MemoryKind, PolicyStep, ValueStep
from mindspeed_rlxf.models.parameters import Head


class CommonEngine:
    """Base of training engines, which set these attributes and define the rest of `TrainEngine`.

    Attributes:
        groups: Process groups; `dp_host` has the data-parallel ranks, for host tensors.
        output_weight: This rank's rows of the output layer, for `read_log_probs_and_kl`; None if it
            has none.
        state: The training state, of a trained role.
    """

    role: RoleConfig
    head: Head
    lora: LoraConfig
    skipped: SkippedSteps
    groups: Any
    state: Any
    output_weight: Any  # a property
    without_adapters: Callable[[], AbstractContextManager[None]]
    is_leader: Any  # a property
    micro_batches: Callable[..., list[MicroBatch]]
    forward: Callable[..., list[Tensor]]
    held_weights: Callable[[], Iterable[Tensor]]
    _offload: Offload

    def _make_offload(self, tensors: Mapping[MemoryKind, offload.Tensors]) -> Offload:
        """Make the memory named by the role's `offload` key movable, and move them to the host."""
        keys = self.role.offload
        movable = [MemoryKind.WEIGHTS] if keys.weights else []
        movable += [MemoryKind.GRADIENTS, MemoryKind.OPTIMIZER] if keys.optimizer else []
        moved = Offload(tensors, movable)
        offload.register(moved)
        moved.offload(moved.movable)
        return moved

    def offload(self) -> None:
        """Move the memory named by the role's `offload` key to host memory."""
        self._offload.offload(self._offload.movable)

    def onload(self) -> None:
        """Bring all memory back to the device; other engines' movable memory makes room."""
        with self.holding(*MemoryKind):
            pass

    def holding(
        self, *kinds: MemoryKind, later: MemoryKind | None = None
    ) -> AbstractContextManager[None]:
        """Return a context manager that keeps memory on the device (see `offload.holding`).

        The copy of kind `later` may still run in the block, until `Offload.await_copies`.
        """
        return offload.holding((self._offload, kinds), later=[later] if later else [])

    @contextmanager
    def changing_weights(self) -> Iterator[Sequence[Tensor]]:
        """Yield this rank's parts of the weights, on the device, to change them in place."""
        with self.holding(MemoryKind.WEIGHTS):
            # Else an older copy comes back from the host.
            self._offload.mark_changed(MemoryKind.WEIGHTS)
            yield list(self.held_weights())

    def _read_all(self, rollouts: Rollouts, read: Any) -> list[Tensor]:
        """Run forward passes over all rows, in order; return `read`'s result per micro-batch."""
        rows = range(rollouts.num_rows)
        return self.forward(self.micro_batches(rollouts, rows, in_order=True), read)

    def _loss(
        self, step: PolicyStep | ValueStep, head: OutputHead, batch: MicroBatch, hidden: Tensor
    ) -> LossOutput:
        """Compute a step's loss from a micro-batch's hidden states."""
        if isinstance(step, PolicyStep):
            settings = step.temperature, step.trains_entropy
            tokens = read_log_probs_and_entropies(head, batch, hidden, *settings)
            return step.loss(batch.rows, tokens)
        slots = step.slots[batch.rows]
        return step.loss(batch.rows, read_values(head, batch, hidden, slots))

    def log_probs(self, rollouts: Rollouts, temperature: float) -> LogProbs | None:
        """Compute log-probs for the trained response tokens, 0 elsewhere."""

        def read(head: OutputHead, batch: MicroBatch, hidden: Tensor) -> Tensor:
            return read_log_probs(head, batch, hidden, temperature)

        flat = self._read_all(rollouts, read)
        return LogProbs(scatter_rows(flat, rollouts.trained_mask)) if self.is_leader else None

    def log_probs_with_kl(
        self, rollouts: Rollouts, temperature: float, policy: CommonEngine
    ) -> LogProbsWithKl | None:
        """Compute the trained tokens' log-probs, and KL(policy || this engine) over the vocabulary.

        None on ranks other than the leader. Both engines must have the same layout, so that a rank
        has the same part of the output layer in both.
        """
        mask = rollouts.trained_mask
        counts = mask.sum(1)
        starts = (counts.cumsum(0) - counts).tolist()

        def read(head: OutputHead, batch: MicroBatch, hidden: Tensor) -> Tensor:
            start = starts[batch.rows[0]]
            batch_states = policy_states[start : start + len(batch.trained_ids)]
            policy_outputs = policy_weight, batch_states, temperature
            return read_log_probs_and_kl(head, batch, hidden, *policy_outputs)

        weights = [MemoryKind.WEIGHTS]
        with offload.holding((self._offload, weights), (policy._offload, weights)):
            # Row after row, as the two engines may make different micro-batches.
            chunks = policy._read_all(rollouts, read_states)
            policy_states = torch.cat(chunks) if chunks else torch.empty(0)
            policy_weight = policy.output_weight
            with self.without_adapters():  # where the policy is this engine
                flat = self._read_all(rollouts, read)
        if not self.is_leader:
            return None
        return LogProbsWithKl(*(scatter_rows([p[i] for p in flat], mask) for i in range(2)))

    def values(self, rollouts: Rollouts) -> Values | None:
        """Compute values for the slots marked by `readable_slots`."""
        slots = readable_slots(rollouts.trained_mask, rollouts.response_mask)

        def read(head: OutputHead, batch: MicroBatch, hidden: Tensor) -> Tensor:
            return read_values(head, batch, hidden, slots[batch.rows])

        flat = self._read_all(rollouts, read)
        return Values(scatter_rows(flat, slots)) if self.is_leader else None

    def scores(self, rollouts: Rollouts) -> Scores | None:
        """Compute the score at each response's last token."""
        flat = self._read_all(rollouts, read_scores)
        return Scores(torch.cat(flat).float().cpu()) if self.is_leader else None

    def _count(self, micro_batches: Sequence[MicroBatch], passes: int) -> None:
        if self.is_leader and self.role.architecture is not None:
            reads_logits = self.head is Head.LANGUAGE_MODEL
            for batch in micro_batches:
                tokens, flops = batch.work(self.role.architecture, reads_logits)
                flop_counter.add(flop_counter.Work(tokens, passes * flops))

    def _step_metrics(
        self,
        micro_batches: Sequence[MicroBatch],
        outputs: Sequence[LossOutput],
        totals: Tensor,
        result: StepResult,
    ) -> dict[str, float]:
        """Count a step's work; return its metrics, over the mini-batch of all replicas.

        `totals` are from `begin_reading_totals`, before the step that the host has waited for.
        """
        metrics = average_metrics(outputs, totals, self.sum_over_replicas)
        self._count(micro_batches, flop_counter.ADAPT if self.lora.rank else flop_counter.TRAIN)
        metrics["grad_norm"] = result.grad_norm
        if self.skipped.policy == "skip":
            metrics["skipped_steps"] = float(bool(result.wrong))
        return metrics

    def sum_over_replicas(self, tensor: Tensor) -> Tensor:
        """Return a small CPU tensor's sum over the data-parallel ranks."""
        total = tensor.clone()
        dist.all_reduce(total, group=self.groups.dp_host)
        return total

    def begin_save(self, folder: Path) -> None:
        """Copy the training state to the host, and start writing it into `folder`."""
        self.state.begin_save(folder)

    def end_save(self) -> float:
        """Wait for all ranks' files; return the slowest rank's seconds.

        Raises OSError on all ranks if one could not write.
        """
        assert self.state.saving is not None, "no save has begun"
        folder, writing = self.state.saving
        self.state.saving = None
        with fail_together(folder):
            seconds = writing.result()  # waits
        return max(gather_all([seconds]))
