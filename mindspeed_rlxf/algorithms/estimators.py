"""Advantage estimators by their `algorithm.adv_estimator` names.

Shapes: `batch` are samples, grouped by prompt; `response` are tokens; `slots` are the reward and
value positions (`slots`), one more than tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from mindspeed_rlxf.algorithms.advantages import (
    estimate_gae,
    length_adaptive_lambda,
    rewards_to_go,
)
from mindspeed_rlxf.algorithms.group_advantages import (
    dr_grpo_advantages,
    grpo_advantages,
    rloo_advantages,
)
from mindspeed_rlxf.config.enums import AdvEstimator
from mindspeed_rlxf.config.estimator_traits import TRAITS, EstimatorTraits
from mindspeed_rlxf.config.registry import register_part


@dataclass(frozen=True)
class Rewarded:
    """Estimator input: rewards and masks on one data-parallel rank.

    All responses to a prompt are on one rank. A response must get the same advantages however
    prompts are distributed over ranks.

    Attributes:
        scores: [batch] fp32, penalties included.
        rewards: [batch, slots] fp32: the score on the last True slot, plus the KL penalty if it
            belongs
        to the reward; whitened with `whiten_rewards`.
        value_mask: [batch, slots] bool, True for trained slots.
        trained_mask: [batch, response] bool, True for trained tokens. A row without True is masked
            out
        (`is_scored`) and must not change other advantages.
        values: [batch, slots] fp32, 0 where masked; None without a critic.
        greedy_scores: [batch], the greedy response's score for the same prompt, penalties included;
        None unless the estimator reads it.
        group_size: Samples per prompt.
        gamma: Discount.
        lam: GAE lambda.
        critic_lam: Lambda for the critic's returns; None = `lam`.
        lam_alpha: The advantages' lambda is 1 - 1 / (lam_alpha * trained tokens); None = `lam`.
    """

    scores: Tensor
    rewards: Tensor
    value_mask: Tensor
    trained_mask: Tensor
    values: Tensor | None
    greedy_scores: Tensor | None
    group_size: int
    gamma: float
    lam: float
    critic_lam: float | None = None
    lam_alpha: float | None = None

    @property
    def is_scored(self) -> Tensor:
        """[batch] bool, False if the response could not be scored and is masked out."""
        return self.trained_mask.any(1)


class Estimate(NamedTuple):
    """Advantages [batch, response], used only for trained tokens, and the critic's target."""

    advantages: Tensor
    returns: Tensor | None = None


Estimator = Callable[[Rewarded], Estimate]


def gae(given: Rewarded) -> Estimate:
    """Return GAE advantages and returns from the critic's values.

    With `lam_alpha`, the advantages' lambda depends on the response length, and with `critic_lam`
    the returns have their own lambda (VAPO, arXiv:2504.05118, sections 4.1 and 4.2).
    """
    assert given.values is not None, "GAE needs the values of a critic"
    of_slots = given.rewards, given.values, given.value_mask, given.gamma
    lam: float | Tensor = given.lam
    if given.lam_alpha is not None:
        lam = length_adaptive_lambda(given.trained_mask.sum(1), given.lam_alpha)
    advantages, returns = estimate_gae(*of_slots, lam)
    if given.lam_alpha is not None or given.critic_lam is not None:
        critic_lam = given.lam if given.critic_lam is None else given.critic_lam
        _, returns = estimate_gae(*of_slots, critic_lam)
    return Estimate(advantages[:, : given.trained_mask.size(1)], returns)


def reinforce_plus_plus(given: Rewarded) -> Estimate:
    """Return each token's discounted rewards to go as advantages (arXiv:2501.03262).

    The caller does the paper's whitening.
    """
    returns = rewards_to_go(given.rewards, given.value_mask, given.gamma)
    return Estimate(returns[:, : given.trained_mask.size(1)])


def remax(given: Rewarded) -> Estimate:
    """Return rewards to go minus the prompt's greedy score (ReMax, arXiv:2310.10505)."""
    assert given.greedy_scores is not None, "ReMax needs the scores of greedy responses"
    return Estimate(reinforce_plus_plus(given).advantages - given.greedy_scores[:, None])


def make_group_estimator(advantages: Callable[[Tensor, Tensor, int], Tensor]) -> Estimator:
    """Return an estimator with one advantage per response, on its trained tokens.

    `advantages` maps (total reward per response [batch], `is_scored`, group_size) to [batch].
    """

    def estimate(given: Rewarded) -> Estimate:
        found = advantages(given.rewards.sum(1), given.is_scored, given.group_size)
        return Estimate(found[:, None] * given.trained_mask)

    return estimate


ESTIMATORS: dict[str, Estimator] = {
    AdvEstimator.GAE.value: gae,
    AdvEstimator.GRPO.value: make_group_estimator(grpo_advantages),
    AdvEstimator.DR_GRPO.value: make_group_estimator(dr_grpo_advantages),
    AdvEstimator.RLOO.value: make_group_estimator(rloo_advantages),
    AdvEstimator.REINFORCE_PLUS_PLUS.value: reinforce_plus_plus,
    AdvEstimator.REINFORCE_PLUS_PLUS_BASELINE.value: make_group_estimator(dr_grpo_advantages),
    AdvEstimator.REMAX.value: remax,
}
"""Name -> estimator; `config.estimators.TRAITS` has the needs of each under the same name."""


def register_estimator(name: str, traits: EstimatorTraits) -> Callable[[Estimator], Estimator]:
    """Return a decorator that makes a function a choice for `algorithm.adv_estimator`.

    `traits` say what it needs, and whether its advantages are whitened by default. Decorating
    raises ValueError if the name is in use.
    """

    def register(estimator: Estimator) -> Estimator:
        register_part(ESTIMATORS, name, estimator, "advantage estimator")
        TRAITS[name] = traits
        return estimator

    return register
