"""Steps with a number that is not finite stop the run or are counted."""

import math

import pytest
import torch

from mindspeed_rlxf.engine import step_guard
from mindspeed_rlxf.engine.step_guard import (
    GuardedOptimizer,
    SkippedSteps,
    StepResult,
    gradient_norm,
)


def test_small_gradients_count_beside_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.norm` on one thread is 0.2% too small here."""
    monkeypatch.setattr(step_guard.device, "current_device", lambda: torch.device("cpu"))
    gradient = torch.full((1025, 4097), 0.1)
    gradient.view(-1)[:8] = 1000.0
    scalar = torch.tensor(2000.0)
    exact = torch.cat([gradient.view(-1), scalar.view(1)]).double().norm().item()
    assert gradient_norm([gradient, scalar]).item() == pytest.approx(exact, rel=1e-6)


def test_raise_names_role_iteration_mini_batch_and_number() -> None:
    judge = SkippedSteps("raise", 5, "critic").judge
    judge(StepResult(1.0), 7, 1)
    message = r"critic: the gradient norm of mini-batch 2 of iteration 7 must be finite .*nan"
    with pytest.raises(FloatingPointError, match=message):
        judge(StepResult(math.nan, ("gradient norm",)), 7, 2)


class Optimizer:
    """Measures the norm before it changes weights, as Megatron's does."""

    def __init__(self, norm: float) -> None:
        self.norm, self.changed = norm, False

    def get_grad_norm(self) -> float:
        return self.norm

    def step(self) -> tuple[bool, float, None]:
        norm = self.get_grad_norm()
        self.changed = True
        return True, norm, None


@pytest.mark.parametrize(
    ("norm", "loss", "wrong"),
    [
        (1.0, 1.0, ()),
        (math.inf, 1.0, ("gradient norm",)),
        (math.nan, 1.0, ("gradient norm",)),
        (1.0, math.inf, ("loss",)),
        (math.nan, math.nan, ("loss", "gradient norm")),
    ],
)
def test_a_step_on_numbers_that_are_not_finite_changes_no_weights(
    norm: float, loss: float, wrong: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_guard.device, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(step_guard.dist, "all_reduce", lambda *_, **__: None)
    optimizer = Optimizer(norm)
    step = GuardedOptimizer(optimizer).step([torch.tensor(loss)])  # type: ignore[arg-type]
    assert step.wrong == wrong and optimizer.changed is (not wrong)
