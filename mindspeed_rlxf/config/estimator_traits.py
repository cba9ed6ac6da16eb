"""Advantage estimator traits behind configuration rules, by name."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mindspeed_rlxf.config.enums import AdvEstimator, LossNormalizer


@dataclass(frozen=True)
class EstimatorTraits:
    """What one advantage estimator needs.

    Attributes:
        needs_critic: Reads a critic's values: True = for stage ray_ppo, False = for ray_grpo.
        compares_group: Needs several responses per prompt, kept on one rank.
        reads_greedy: Needs each prompt's score for a greedy response.
        discounts: Reads token rewards; False = a response's total score.
        whitens: Whitens advantages over the batch unless `advantage_whiten` is set.
        defaults: Other keys in `algorithm` -> their defaults for this estimator.
    """

    needs_critic: bool = False
    compares_group: bool = False
    reads_greedy: bool = False
    discounts: bool = False
    whitens: bool = False
    defaults: Mapping[str, str] = field(default_factory=dict)

    @property
    def reads_token_rewards(self) -> bool:
        """Whether token rewards are discounted and may be whitened."""
        return self.discounts and not self.reads_greedy


KL_IN_LOSS = {"kl_in": "loss"}
"""Default for estimators whose papers put the KL penalty in the loss."""

TRAITS: dict[str, EstimatorTraits] = {
    AdvEstimator.GAE.value: EstimatorTraits(needs_critic=True, discounts=True, whitens=True),
    AdvEstimator.GRPO.value: EstimatorTraits(compares_group=True, defaults=KL_IN_LOSS),
    AdvEstimator.DR_GRPO.value: EstimatorTraits(
        compares_group=True,
        defaults={**KL_IN_LOSS, "loss_normalizer": LossNormalizer.SEQUENCE_SUMS.value},
    ),
    AdvEstimator.RLOO.value: EstimatorTraits(compares_group=True),
    AdvEstimator.REINFORCE_PLUS_PLUS.value: EstimatorTraits(discounts=True, whitens=True),
    AdvEstimator.REINFORCE_PLUS_PLUS_BASELINE.value: EstimatorTraits(
        compares_group=True, whitens=True, defaults=KL_IN_LOSS
    ),
    AdvEstimator.REMAX.value: EstimatorTraits(reads_greedy=True, discounts=True),
    AdvEstimator.OPO.value: EstimatorTraits(compares_group=True, defaults=KL_IN_LOSS),
    AdvEstimator.GPG.value: EstimatorTraits(compares_group=True, defaults=KL_IN_LOSS),
    AdvEstimator.GRPO_BATCH.value: EstimatorTraits(compares_group=True, defaults=KL_IN_LOSS),
}
"""Name in `algorithm.adv_estimator` -> traits; `algorithms.estimators` has the functions."""
