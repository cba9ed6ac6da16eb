"""Reward functions for the tiny task, whose prompts are `12+34=` (docs/data_and_rewards.md)."""

from __future__ import annotations

from typing import Any


def close(
    prompt: str, response: str, ground_truth: str, extra_info: dict[str, Any], near: float = 0.5
) -> dict[str, float]:
    """Score 1 for the sum, `near` for a number that differs only in the last digit, else 0."""
    said, right = response.strip(), ground_truth.strip()
    exact = said == right
    is_near = said.isdigit() and said[:-1] == right[:-1]
    return {"score": 1.0 if exact else near * is_near, "exact": exact}


async def short(prompt: str, response: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """Score 1 for a response that is not longer than the sum, else 0. A coroutine works too."""
    return float(len(response.strip()) <= len(ground_truth))
