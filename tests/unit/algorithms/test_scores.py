"""Scaling and clipping of scores, and the penalty for overlong responses."""

import pytest
import torch

from mindspeed_rlxf.algorithms.advantages import overlong_penalty, shape_scores


def test_scores_are_scaled_then_clipped() -> None:
    scores = torch.tensor([-9.0, 1.0, 30.0])
    assert shape_scores(scores, 0.5, None).tolist() == [-4.5, 0.5, 15.0]
    assert shape_scores(scores, 0.5, 4.0).tolist() == [-4.0, 0.5, 4.0]
    assert shape_scores(scores, 1.0, None).tolist() == scores.tolist()


@pytest.mark.parametrize(
    ("length", "penalty"),
    [
        # 20 tokens at most, the last 8 of them penalised, up to 0.5
        (1, 0.0),
        (12, 0.0),
        (13, 0.0625),  # 1 / 8 of 0.5
        (16, 0.25),
        (20, 0.5),
    ],
)
def test_penalty_rises_within_the_buffer(length: int, penalty: float) -> None:
    found = overlong_penalty(torch.tensor([length]), 20, 8, 0.5)
    assert found.tolist() == [penalty]


def test_no_buffer_is_no_penalty() -> None:
    assert overlong_penalty(torch.tensor([1, 20]), 20, 0, 5.0).tolist() == [0.0, 0.0]
