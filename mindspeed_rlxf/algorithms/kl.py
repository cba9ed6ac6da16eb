"""KL between policy and reference from sampled tokens, and its coefficient."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mindspeed_rlxf.algorithms.ratios import bounded_log_ratio
from mindspeed_rlxf.config.enums import KlPenalty

MAX_LOW_VAR_KL = 10.0


def kl_per_token(log_probs: Tensor, ref_log_probs: Tensor, kind: KlPenalty) -> Tensor:
    """Estimate the KL of each token (http://joschu.net/blog/kl-approx.html); any shape, fp32.

    `kl` is k1, `mse` k2, `low_var_kl` k3 of that note. k3 grows as exp(-d): d is held within +-20
    and the estimate within +-10 (verl's bounds), with gradient 0 beyond them; NaN stays NaN.
    """
    difference = log_probs - ref_log_probs
    if kind is KlPenalty.KL:
        return difference
    if kind is KlPenalty.ABS:
        return difference.abs()
    if kind is KlPenalty.MSE:
        return difference.square() / 2
    assert kind is KlPenalty.LOW_VAR_KL, f"unknown KL penalty {kind}"
    difference = bounded_log_ratio(difference)
    estimate = torch.exp(-difference) - 1 + difference
    return estimate.clamp(-MAX_LOW_VAR_KL, MAX_LOW_VAR_KL)


class KlController:
    """The KL coefficient; `adaptive` follows arXiv:1909.08593, section 2.2.

    value *= 1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon, once per iteration.
    """

    def __init__(self, kl_coef: float, adaptive: bool, target_kl: float, horizon: float) -> None:
        self.value = kl_coef
        self._adaptive, self._target, self._horizon = adaptive, target_kl, horizon

    def update(self, kl: float, num_samples: int) -> None:
        """Adapt the coefficient to this iteration's KL; a fixed one stays.

        kl: mean over the iteration's samples of their mean KL per token; NaN changes nothing
        num_samples: of the iteration
        """
        if not self._adaptive or math.isnan(kl):
            return
        error = min(max(kl / self._target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * num_samples / self._horizon

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = float(state["value"])  # JSON may have an integer of any size
