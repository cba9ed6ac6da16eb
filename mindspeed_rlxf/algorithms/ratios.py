"""Bounds of log-ratios, so that exp of one is a finite number in fp32."""

from __future__ import annotations

from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp of it is 4.9e8, exp of its negative 2.1e-9."""


def bounded_log_ratio(log_ratio: Tensor) -> Tensor:
    """Hold a difference of log-probs within +-20, verl's bounds (verl/trainer/ppo/core_algos.py).

    The gradient is exact within the bounds and 0 beyond them; NaN stays NaN. any shape.
    """
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
