"""Bounds of log-ratios, so that exp of one is a finite number in fp32."""

from __future__ import annotations

from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp(20) is 4.9e8 and exp(-20) is 2.1e-9."""


def bounded_log_ratio(log_ratio: Tensor) -> Tensor:
    """Return log_ratio clamped to +-20, verl's bounds (verl/trainer/ppo/core_algos.py); any shape.

    The gradient is exact within the bounds and 0 beyond them; NaN stays NaN.
    """
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
