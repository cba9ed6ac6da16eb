"""Steps with a number that is not finite stop the run or are counted."""

from __future__ import annotations

import math

import pytest

from mindspeed_rlxf.config.enums import NanPolicy
from mindspeed_rlxf.engine.finite import SkippedSteps, Step

GOOD, BAD = Step(1.0), Step(math.nan, ("gradient norm",))


def test_raise_names_role_iteration_mini_batch_and_number() -> None:
    judge = SkippedSteps(NanPolicy.RAISE, 5, "critic").judge
    judge(GOOD, 7, 1)
    message = r"critic: the gradient norm of mini-batch 2 of iteration 7 must be finite .*nan"
    with pytest.raises(FloatingPointError, match=message):
        judge(BAD, 7, 2)


def test_skip_raises_after_so_many_in_a_row() -> None:
    skipped = SkippedSteps(NanPolicy.SKIP, 2, "actor")
    for step in (BAD, BAD, GOOD, BAD, BAD):  # never three in a row
        skipped.judge(step, 1, 1)
    with pytest.raises(FloatingPointError, match=r"2 steps before, over training.max_skipped=2"):
        skipped.judge(BAD, 1, 1)
