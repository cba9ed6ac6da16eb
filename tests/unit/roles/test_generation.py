"""Results of an engine become the rows of a batch."""

import numpy as np
import torch

from mindspeed_rlxf.data.batch import Prompts
from mindspeed_rlxf.roles.rollout import gather_rollouts
from mindspeed_rlxf.rollout.rollout_engine import FinishReason, GenerationResult

PROMPTS = Prompts(
    [40, 41, 42], [np.array([1, 2]), np.array([3]), np.array([4, 5, 6])],
    ["a", "b", "c"], ["x", "y", "z"], [[]] * 3, [{"n": i} for i in range(3)],
)  # fmt: skip
RESULTS = [  # as they finish
    GenerationResult(1, [7], [-1.0], FinishReason.STOP, 5),
    GenerationResult(2, [8, 9], [-2.0, -3.0], FinishReason.LENGTH, 5),
    GenerationResult(0, [7, 8, 9], [-4.0, -5.0, -6.0], FinishReason.STOP, 4),
]


def test_rows_stand_in_the_order_of_the_prompts() -> None:
    rows = gather_rollouts(PROMPTS, iter(RESULTS))
    assert rows.sample_ids == [40, 41, 42] and rows.ground_truths == ["a", "b", "c"]
    assert rows.extra_infos == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert rows.prompt_ids.tolist() == [[1, 2, 0], [3, 0, 0], [4, 5, 6]]
    assert rows.response_ids.tolist() == [[7, 8, 9], [7, 0, 0], [8, 9, 0]]
    assert rows.response_lengths.tolist() == [3, 1, 2]
    assert rows.has_eos.tolist() == [True, True, False]
    assert rows.rollout_log_probs.tolist() == [[-4.0, -5.0, -6.0], [-1.0, 0, 0], [-2.0, -3.0, 0]]
    assert rows.weights_version.dtype == torch.int32
    assert rows.weights_version.tolist() == [[4, 4, 4], [5, 0, 0], [5, 5, 0]]
