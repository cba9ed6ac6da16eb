"""Shape scores: scale, clip, then subtract the penalties of a response."""

from __future__ import annotations

from torch import Tensor

from mindspeed_rlxf.algorithms.scores import overlong_penalty, shape_scores
from mindspeed_rlxf.config.schema import RunConfig


class ScoreShaping:
    """Shapes scores by the keys of `algorithm`: scale, clip and penalties."""

    def __init__(self, config: RunConfig) -> None:
        self.algorithm = config.algorithm
        self.max_new_tokens = config.actor_rollout.max_new_tokens

    def shape(self, scores: Tensor) -> Tensor:
        """Return scores times `reward_scale`, clipped to +-`reward_clip`; NaN where not finite.

        [batch] fp32 -> [batch] fp32
        """
        return shape_scores(scores, self.algorithm.reward_scale, self.algorithm.reward_clip)

    def penalize(self, scores: Tensor, response_lengths: Tensor, has_eos: Tensor) -> Tensor:
        """Return scores after `shape`, less the penalties for a missing EOS and for length.

        scores: [batch] fp32, not shaped; response_lengths: [batch] int64; has_eos: [batch] bool
        Returns [batch] fp32.
        """
        algorithm = self.algorithm
        score = self.shape(scores) - algorithm.missing_eos_penalty * (~has_eos)
        return score - overlong_penalty(
            response_lengths,
            self.max_new_tokens,
            algorithm.overlong_buffer_len,
            algorithm.overlong_penalty_factor,
        )
