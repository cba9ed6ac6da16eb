"""Measure gradients, and guard optimizer steps against NaN and inf.

The loss and the gradient norm are checked before any weight changes. All ranks in the role agree on
the result once per step, so replicas, pipeline stages and optimizer shards either all take the step
or all skip it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rlxf import device

if TYPE_CHECKING:
    from megatron.core.optimizer.optimizer import MegatronOptimizer

ROW = 512  # elements that are summed one after the other
REMEDY = "lower the learning rate or raise warm-up, look at the rewards and at bf16"


def gradient_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Return the 2-norm of all elements, an fp32 scalar.

    It is taken in rows. On a CPU `torch.norm` adds the squares of a whole tensor in fp32, and loses
    what is small beside the sum: 3e-5 of the norm for an embedding of 28 million elements.
    """
    rows = [torch.zeros(1, device=device.current_device())]
    for gradient in gradients:
        whole = gradient.numel() // ROW * ROW
        flat = gradient.reshape(-1)
        rows.append(torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1))
        rows.append(torch.linalg.vector_norm(flat[whole:]).view(1))
    return torch.cat(rows).square().sum().sqrt()


def has_wrong_loss(losses: Sequence[Tensor]) -> Tensor:
    """Return 1 if a loss is not finite, else 0: an fp32 scalar on the device."""
    if not losses:  # before the last pipeline stage
        return torch.zeros((), device=device.current_device())
    return torch.stack(list(losses)).isfinite().all().logical_not().float()


@dataclass(frozen=True)
class StepResult:
    """An optimizer step's gradient norm, and why it was skipped, if it was."""

    grad_norm: float  # before clipping
    wrong: tuple[str, ...] = ()  # non-finite numbers, which skipped the step


class _Stopped(Exception):
    """Leaves Megatron's step after the gradient norm and before weights change."""

    def __init__(self, result: StepResult) -> None:
        self.result = result


class GuardedOptimizer:
    """Wraps Megatron's optimizer; skips a step, before weights change, if a number is not finite.

    Replaces the optimizer's `get_grad_norm`, which Megatron calls after summing gradients over the
    replicas, and before it clips them and changes weights.
    """

    def __init__(self, optimizer: MegatronOptimizer) -> None:
        self.optimizer = optimizer
        self._measure = optimizer.get_grad_norm
        optimizer.get_grad_norm = self._checked_norm  # type: ignore[method-assign]
        self._wrong_loss: Tensor | None = None  # 1 or 0, on the device
        self._checked = False

    def step(self, losses: Sequence[Tensor]) -> StepResult:
        """Take an optimizer step, or skip it if a number is not finite; a collective.

        The losses are scalars from this rank's micro-batches. Returns the gradient norm, and the
        numbers not finite on any rank.
        """
        self._wrong_loss = has_wrong_loss(losses)
        self._checked = False
        try:
            updated, grad_norm, _ = self.optimizer.step()
        except _Stopped as stopped:
            return stopped.result
        assert updated, "the optimizer skipped its step"
        assert self._checked, "the optimizer changed weights without measuring its gradients"
        return StepResult(float(grad_norm))

    def _checked_norm(self) -> float:
        """Return the gradient norm; a collective."""
        norm = float(self._measure())
        self._checked = True
        assert self._wrong_loss is not None, "the step has begun"
        wrong_norm = torch.full_like(self._wrong_loss, not math.isfinite(norm))
        flags = torch.stack((self._wrong_loss, wrong_norm))
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        names = "loss", "gradient norm"
        wrong = tuple(name for name, flag in zip(names, flags.tolist(), strict=True) if flag)
        if wrong:
            raise _Stopped(StepResult(norm, wrong))
        return norm


class SkippedSteps:
    """Counts consecutive skipped steps and decides whether the run goes on."""

    def __init__(self, policy: str, max_skipped: int, role: str) -> None:
        self.policy = policy
        self.max_skipped = max_skipped
        self.role = role
        self.in_a_row = 0

    def judge(self, step: StepResult, iteration: int, mini_batch: int) -> None:
        """Count a skipped step; a taken step resets the count.

        Raises FloatingPointError for a skipped step if `training.nan_policy` is `raise`, or if more
        than `max_skipped` in a row were skipped. The message counts iteration and mini-batch from
        1.
        """
        if not step.wrong:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        numbers = " and ".join(step.wrong)
        subject = f"{self.role}: the {numbers} of mini-batch {mini_batch} of iteration {iteration}"
        if self.policy == "raise":
            raise FloatingPointError(
                f"{subject} must be finite (gradient norm {step.grad_norm}); its step was not "
                f"taken, the weights are those before it; {REMEDY}, or set training.nan_policy=skip"
            )
        if self.in_a_row > self.max_skipped:
            raise FloatingPointError(
                f"{subject} must be finite (gradient norm {step.grad_norm}), as those of the "
                f"{self.in_a_row - 1} steps before, over training.max_skipped={self.max_skipped}; "
                f"none of these steps was taken; {REMEDY}"
            )
