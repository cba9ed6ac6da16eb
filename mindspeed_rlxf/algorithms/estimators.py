"""Advantage estimators by their names in `algorithm.adv_estimator`.

Axes: batch = samples, those of one prompt next to each other; response = tokens; slots = positions
of rewards and values (`slots`), one more than tokens.
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
    """Input of an estimator: rewards and masks of the responses of one data-parallel rank.

    All responses to a prompt are on one rank. An estimator must give a response the same advantages
    however prompts are distributed over ranks.

    scores:        [batch] fp32, penalties included
    rewards:       [batch, slots] fp32: the score on the last True slot, and the KL penalty if it is
                   in the reward; whitened with `whiten_rewards`
    value_mask:    [batch, slots] bool, True = slot that is trained
    trained_mask:  [batch, response] bool, True = token that is trained; a row without True is
                   masked out (`is_scored`): it must not change the advantages of others
    values:        [batch, slots] fp32, 0 where masked; None without a critic
    greedy_scores: [batch], of the greedy response to the same prompt, penalties included; None
                   unless the estimator reads it
    group_size:    samples of one prompt
    critic_lam:    lambda of the returns that the critic learns; None = `lam`
    lam_alpha:     lambda of the advantages is 1 - 1 / (lam_alpha * trained tokens); None = `lam`
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
        """[batch] bool, False = the response is masked out, because it could not be scored."""
        return self.trained_mask.any(1)


class Estimate(NamedTuple):
    """Output of an estimator.

    advantages: [batch, response]; used only where `trained_mask` is True
    returns:    [batch, slots], what the critic learns; None without a critic
    """

    advantages: Tensor
    returns: Tensor | None = None


Estimator = Callable[[Rewarded], Estimate]


def gae(given: Rewarded) -> Estimate:
    """Return GAE advantages and returns by the critic's values.

    With `lam_alpha` the advantages' lambda depends on the response's length, and with `critic_lam`
    the returns have a lambda of their own, else `lam` (VAPO, arXiv:2504.05118, sections 4.1 and
    4.2). The advantages are cut to the slots of tokens. AssertionError without values.
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
    """Return the discounted rewards to go of each token as advantages; `returns` is None.

    REINFORCE++, arXiv:2501.03262. The paper's whitening is done by the caller.
    """
    returns = rewards_to_go(given.rewards, given.value_mask, given.gamma)
    return Estimate(returns[:, : given.trained_mask.size(1)])


def remax(given: Rewarded) -> Estimate:
    """Return as advantages the rewards to go minus the score of the prompt's greedy response.

    ReMax, arXiv:2310.10505. No returns. AssertionError without `greedy_scores`.
    """
    assert given.greedy_scores is not None, "ReMax needs the scores of greedy responses"
    return Estimate(reinforce_plus_plus(given).advantages - given.greedy_scores[:, None])


def make_group_estimator(advantages: Callable[[Tensor, Tensor, int], Tensor]) -> Estimator:
    """Return an estimator that gives all trained tokens of a response the same advantage, others 0.

    It has no returns.
    advantages: function of (sum of the rewards of each response [batch], whether the response is
                scored [batch] bool, group_size) -> [batch]
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
    """Return a decorator that makes a function a choice of `algorithm.adv_estimator`.

    It puts the function into ESTIMATORS and `traits` into TRAITS under `name`, and returns the
    function unchanged.
    traits: needs of the estimator, and whether the caller whitens its advantages by default
    Errors: ValueError, when it decorates, for a name in use.
    """

    def register(estimator: Estimator) -> Estimator:
        register_part(ESTIMATORS, name, estimator, "advantage estimator")
        TRAITS[name] = traits
        return estimator

    return register
