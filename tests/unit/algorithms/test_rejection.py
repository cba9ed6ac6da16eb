"""Tokens and responses whose probability differs between generation and training are rejected."""

from math import log

import pytest
import torch

from mindspeed_rlxf.algorithms.rejection import keep_near_rollout

# Training / rollout: 2 and 1, 1/4 and 1, 2 and 2; the last column is padding.
LOG_RATIO = torch.tensor([[log(2), 0.0, 9.0], [-log(4), 0.0, -9.0], [log(2), log(2), 9.0]])
MASK = torch.tensor([[True, True, False]] * 3)
BOTH, FIRST, NONE = [True, True], [False, True], [False, False]
CASES = {
    # exp(k1) is rollout / training: 1/2 1, 4 1, 1/2 1/2
    "token_k1": ([0.6, 3.0], [FIRST, FIRST, NONE]),
    "seq_sum_k1": ([0.3, 3.0], [BOTH, NONE, NONE]),  # 1/2, 4, 1/4
    "seq_mean_k1": ([0.6, 3.0], [BOTH, BOTH, NONE]),  # 0.71, 2, 1/2
    "seq_max_k1": ([0.6, 3.0], [BOTH, NONE, NONE]),  # 1, 4, 1/2
    # 0.24 0, 0.96 0, 0.24 0.24
    "token_k2": ([0.5], [BOTH, FIRST, BOTH]),
    "seq_sum_k2": ([0.4], [BOTH, NONE, NONE]),  # 0.24, 0.96, 0.48
    "seq_mean_k2": ([0.3], [BOTH, NONE, BOTH]),  # 0.12, 0.48, 0.24
    "seq_max_k2": ([0.4], [BOTH, NONE, BOTH]),  # 0.24, 0.96, 0.24
    # 2 - 1 - 0.693 = 0.307 0, 0.25 - 1 + 1.386 = 0.636 0, 0.307 0.307
    "token_k3": ([0.5], [BOTH, FIRST, BOTH]),
    "seq_sum_k3": ([0.62], [BOTH, NONE, BOTH]),  # 0.307, 0.636, 0.614
    "seq_mean_k3": ([0.31], [BOTH, NONE, BOTH]),  # 0.153, 0.318, 0.307
    "seq_max_k3": ([0.6], [BOTH, NONE, BOTH]),  # 0.307, 0.636, 0.307
}


@pytest.mark.parametrize("statistic", CASES)
def test_rejection_by_hand(statistic: str) -> None:
    limits, expected = CASES[statistic]
    kept = keep_near_rollout(LOG_RATIO, MASK, {statistic: limits})
    assert kept.tolist() == [[*row, False] for row in expected]


@pytest.mark.parametrize("names", [("token_k1", "seq_max_k2"), ("seq_max_k2", "token_k1")])
def test_all_bounds_must_hold(names: tuple[str, ...]) -> None:
    bounds = {"token_k1": [0.6, 9.0], "seq_max_k2": [0.5]}
    kept = keep_near_rollout(LOG_RATIO, MASK, {name: bounds[name] for name in names})
    assert kept[:, :2].tolist() == [FIRST, NONE, NONE]
