"""KL estimates against their formulas, and the controllers of the KL coefficient."""

import math

import pytest
import torch
from torch.testing import assert_close

from mindspeed_rlxf.algorithms.kl import KlController, kl_per_token
from mindspeed_rlxf.config.enums import KlPenalty

LN2 = math.log(2.0)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # policy 1/2, reference 1/4: d = ln 2; policy 1/4, reference 1/2: d = -ln 2
        (KlPenalty.KL, [LN2, -LN2]),
        (KlPenalty.ABS, [LN2, LN2]),
        (KlPenalty.MSE, [LN2**2 / 2, LN2**2 / 2]),
        (KlPenalty.LOW_VAR_KL, [0.5 - 1 + LN2, 2 - 1 - LN2]),
    ],
)
def test_kl_kinds_by_hand(kind: KlPenalty, expected: list[float]) -> None:
    log_probs, ref = torch.tensor([0.5, 0.25]).log(), torch.tensor([0.25, 0.5]).log()
    assert_close(kl_per_token(log_probs, ref, kind), torch.tensor(expected))


@pytest.mark.parametrize(
    ("difference", "value", "slope"),
    [
        # d = policy - reference; value exp(-d) - 1 + d, slope 1 - exp(-d)
        (19.0, 10.0, 0.0),  # 18 + 6e-9, over the bound of the value
        (95.0, 10.0, 0.0),
        (-95.0, 10.0, 0.0),  # exp(95) is inf in fp32
        (9.0, math.exp(-9) + 8, 1 - math.exp(-9)),
        (-2.5, math.exp(2.5) - 3.5, 1 - math.exp(2.5)),
        (math.nan, math.nan, 0.0),  # the loss says that something is wrong
    ],
)
def test_low_variance_kl_is_bounded(difference: float, value: float, slope: float) -> None:
    ref = torch.tensor([-1.0])
    log_probs = (ref + difference).requires_grad_()
    found = kl_per_token(log_probs, ref, KlPenalty.LOW_VAR_KL)
    (gradient,) = torch.autograd.grad(found.sum(), log_probs)
    assert_close(found.detach(), torch.tensor([value]), equal_nan=True)
    assert_close(gradient, torch.tensor([slope]))


@pytest.mark.parametrize(
    ("adaptive", "kl", "num_samples", "factor"),
    [
        (True, 2.2, 100, 1.01),  # 2.2 / 2 - 1 = 0.1, times 100 samples of a horizon of 1000
        (True, 2.0, 100, 1.0),
        (True, 50.0, 100, 1.02),  # clipped at 0.2
        (True, 0.0, 100, 0.98),  # clipped at -0.2
        (True, 0.0, 8192, 0.5),  # 1 - 0.2 * 8.192 = -0.64
        (True, 50.0, 8192, 2.0),  # 1 + 0.2 * 8.192 = 2.64
        (True, math.nan, 100, 1.0),
        (False, 50.0, 100, 1.0),
    ],
)
def test_coefficient_by_hand(adaptive: bool, kl: float, num_samples: int, factor: float) -> None:
    controller = KlController(0.1, adaptive=adaptive, target_kl=2.0, horizon=1000)
    controller.update(kl, num_samples)
    assert controller.value == pytest.approx(0.1 * factor)
