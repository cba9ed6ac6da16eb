"""KL between policy and reference, estimated from sampled tokens, and its coefficient."""

import math

import torch
from torch import Tensor

from mindspeed_rlxf.config.enums import KlPenalty

MAX_LOG_RATIO = 20.0
"""exp(20) is 4.9e8 and exp(-20) is 2.1e-9."""


def bounded_log_ratio(log_ratio: Tensor) -> Tensor:
    """Clamp a log-ratio to +-20, verl's bounds (verl/trainer/ppo/core_algos.py).

    The gradient is exact within the bounds and 0 beyond them; NaN stays NaN.
    """
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


MAX_LOW_VAR_KL = 10.0


def kl_per_token(log_probs: Tensor, ref_log_probs: Tensor, kind: KlPenalty) -> Tensor:
    """Return each token's KL estimate, in the arguments' shape and dtype.

    With d = log_probs - ref_log_probs: `kl` is d (k1 in http://joschu.net/blog/kl-approx.html),
    `abs` |d|, `mse` d^2 / 2 (k2), `low_var_kl` exp(-d) - 1 + d (k3). For `low_var_kl`, d is clamped
    to +-20 and the estimate to +-10 (verl's bounds), with gradient 0 beyond them; NaN stays NaN.
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
    """The KL coefficient `value`, fixed or adaptive (arXiv:1909.08593, section 2.2).

    If adaptive, each iteration multiplies it by 1 + clip(kl / target - 1, -0.2, 0.2) * num_samples
    / horizon, clamped to [0.5, 2].
    """

    def __init__(self, kl_coef: float, adaptive: bool, target_kl: float, horizon: float) -> None:
        self.value = kl_coef
        self._adaptive = adaptive
        self._target = target_kl
        self._horizon = horizon

    def update(self, kl: float, num_samples: int) -> None:
        """Raise an adaptive `value` if `kl` exceeds the target, lower it if below.

        Args:
            kl: Mean over samples; each sample's KL is a mean over its tokens. NaN changes nothing.
            num_samples: Samples in the iteration.
        """
        if not self._adaptive or math.isnan(kl):
            return
        error = min(max(kl / self._target - 1.0, -0.2), 0.2)
        # More samples than 5 * horizon would make the plain factor 0 or negative.
        self.value *= min(max(1.0 + error * num_samples / self._horizon, 0.5), 2.0)
