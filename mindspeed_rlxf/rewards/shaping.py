"""Shape scores: scale, clip, then subtract the penalties of a response."""

from __future__ import annotations

from torch import Tensor

from mindspeed_rlxf.algorithms.scores import overlong_penalty, shape_scores
from mindspeed_rlxf.config.schema import RunConfig


class ScoreShaping:
    def __init__(self, config: RunConfig) -> None:
        self.algorithm = config.algorithm
        self.max_new_tokens = config.actor_rollout.max_new_tokens

    def shape(self, scores: Tensor) -> Tensor:
        """Scale and clip scores; NaN where a score is not finite.

        [batch] fp32 -> [batch] fp32
        """
        return shape_scores(scores, self.algorithm.reward_scale, self.algorithm.reward_clip)

    def penalize(self, scores: Tensor, response_lengths: Tensor, has_eos: Tensor) -> Tensor:
        """Shape scores and subtract the penalties for a missing EOS and for length.

        scores: [batch] fp32; response_lengths: [batch] int64; has_eos: [batch] bool
        """
        algorithm = self.algorithm
        score = self.shape(scores) - algorithm.missing_eos_penalty * (~has_eos)
        return score - overlong_penalty(
            response_lengths,
            self.max_new_tokens,
            algorithm.overlong_buffer_len,
            algorithm.overlong_penalty_factor,
        )
