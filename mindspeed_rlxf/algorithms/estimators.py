"""Advantage estimators by their `algorithm.adv_estimator` names.

Shapes: `batch` are samples; the `group_size` samples for a prompt (a group) are adjacent.
`response` are tokens; `slots` are the reward and value positions (`slots`), one more than tokens.

Group advantages compare response totals: score, penalties, and the KL penalty if it belongs to the
reward. A response that is not `scored` belongs to no group: its advantage is 0, like that for a
response alone in its group.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from mindspeed_rlxf.algorithms.advantages import (
    estimate_gae,
    length_adaptive_lambda,
    rewards_to_go,
)
from mindspeed_rlxf.algorithms.masked import AllReduce, alone
from mindspeed_rlxf.config.enums import AdvEstimator
from mindspeed_rlxf.config.estimator_traits import TRAITS, EstimatorTraits
from mindspeed_rlxf.config.registry import add_to


@dataclass(frozen=True)
class AdvantageInputs:
    """Input of an estimator: rewards and masks on one data-parallel rank.

    All responses to a prompt are on one rank. A response must get the same advantages however
    prompts are distributed over ranks.

    Attributes:
        scores: [batch] fp32, penalties included.
        rewards: [batch, slots] fp32: the score on the last True slot, plus the KL penalty if it
            belongs to the reward; whitened with `whiten_rewards`.
        value_mask: [batch, slots] bool, True for trained slots.
        trained_mask: [batch, response] bool, True for trained tokens. A row without True is masked
            out (`is_scored`) and must not change other advantages.
        values: [batch, slots] fp32, 0 where masked; None without a critic.
        greedy_scores: [batch], the greedy response's score for the same prompt, penalties included;
            None unless the estimator reads it.
        group_size: Samples per prompt.
        gamma: Discount.
        lam: GAE lambda.
        critic_lam: Lambda for the critic's returns; None = `lam`.
        lam_alpha: The advantages' lambda is 1 - 1 / (lam_alpha * trained tokens); None = `lam`.
        sum_over_replicas: Returns a tensor's sum over the data-parallel ranks.
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
    sum_over_replicas: AllReduce = alone

    @property
    def is_scored(self) -> Tensor:
        """[batch] bool, False if the response could not be scored and is masked out."""
        return self.trained_mask.any(1)


class Advantages(NamedTuple):
    """Advantages [batch, response], used only for trained tokens, and the critic's target."""

    advantages: Tensor
    returns: Tensor | None = None


Estimator = Callable[[AdvantageInputs], Advantages]


def gae(inputs: AdvantageInputs) -> Advantages:
    """Return GAE advantages and returns from the critic's values.

    With `lam_alpha`, the advantages' lambda depends on the response length, and with `critic_lam`
    the returns have their own lambda (VAPO, arXiv:2504.05118, sections 4.1 and 4.2).
    """
    assert inputs.values is not None, "GAE needs the values of a critic"
    lam: float | Tensor = inputs.lam
    if inputs.lam_alpha is not None:
        lam = length_adaptive_lambda(inputs.trained_mask.sum(1), inputs.lam_alpha)
    advantages, returns = estimate_gae(
        inputs.rewards, inputs.values, inputs.value_mask, inputs.gamma, lam
    )
    if inputs.lam_alpha is not None or inputs.critic_lam is not None:
        critic_lam = inputs.lam if inputs.critic_lam is None else inputs.critic_lam
        _, returns = estimate_gae(
            inputs.rewards, inputs.values, inputs.value_mask, inputs.gamma, critic_lam
        )
    return Advantages(advantages[:, : inputs.trained_mask.size(1)], returns)


def reinforce_plus_plus(inputs: AdvantageInputs) -> Advantages:
    """Return each token's discounted rewards to go as advantages (arXiv:2501.03262).

    The caller does the paper's whitening.
    """
    returns = rewards_to_go(inputs.rewards, inputs.value_mask, inputs.gamma)
    return Advantages(returns[:, : inputs.trained_mask.size(1)])


def remax(inputs: AdvantageInputs) -> Advantages:
    """Return rewards to go minus the prompt's greedy score (ReMax, arXiv:2310.10505)."""
    assert inputs.greedy_scores is not None, "ReMax needs the scores of greedy responses"
    return Advantages(reinforce_plus_plus(inputs).advantages - inputs.greedy_scores[:, None])


def grpo_advantages(rewards: Tensor, scored: Tensor, group_size: int) -> Tensor:
    """Return (R - mean) / (std + 1e-8) within each group (GRPO, arXiv:2402.03300, 4.1.2).

    `rewards`, `scored` and the result are [batch]. The standard deviation has divisor n - 1.
    """
    centred, counts = _centre(rewards, scored, group_size)
    variance = centred.square().sum(1, keepdim=True) / (counts - 1).clamp(min=1)
    return (centred / (variance.sqrt() + 1e-8)).flatten().to(rewards.dtype)


def dr_grpo_advantages(rewards: Tensor, scored: Tensor, group_size: int) -> Tensor:
    """Return R - group mean (Dr. GRPO, arXiv:2503.20783, 3.2), as `grpo_advantages`."""
    return _centre(rewards, scored, group_size)[0].flatten().to(rewards.dtype)


def rloo_advantages(rewards: Tensor, scored: Tensor, group_size: int) -> Tensor:
    """Return R - mean over the group's other rewards (RLOO, arXiv:2402.14740).

    Equals (R - group mean) * n / (n - 1). Arguments as for `grpo_advantages`.
    """
    centred, counts = _centre(rewards, scored, group_size)
    return (centred * counts / (counts - 1).clamp(min=1)).flatten().to(rewards.dtype)


def opo(inputs: AdvantageInputs) -> Advantages:
    """Return R - the group's mean of R weighted by length (OPO, arXiv:2505.23585, section 3)."""
    rewards = (
        inputs.rewards.sum(1).double().where(inputs.is_scored, 0.0).view(-1, inputs.group_size)
    )
    lengths = inputs.trained_mask.sum(1).double().view(-1, inputs.group_size)
    baseline = (rewards * lengths).sum(1, keepdim=True) / lengths.sum(1, keepdim=True).clamp(min=1)
    has_several = (lengths > 0).sum(1, keepdim=True) > 1
    advantages = (rewards - baseline).where(has_several, 0.0).flatten().to(inputs.rewards.dtype)
    return Advantages(advantages[:, None] * inputs.trained_mask)


def gpg(inputs: AdvantageInputs) -> Advantages:
    """Return R - group mean, times responses / responses with R != 0 (GPG, arXiv:2504.02546).

    The factor, which makes up for groups without a gradient, is that of the whole batch.
    """
    rewards = inputs.rewards.sum(1)
    scored = inputs.is_scored
    counts = torch.stack([scored.sum(), (scored & (rewards != 0)).sum()]).double()
    num_scored, num_nonzero = inputs.sum_over_replicas(counts)
    factor = float(num_scored / num_nonzero.clamp(min=1))
    advantages = dr_grpo_advantages(rewards, scored, inputs.group_size) * factor
    return Advantages(advantages[:, None] * inputs.trained_mask)


def grpo_batch(inputs: AdvantageInputs) -> Advantages:
    """Return (R - group mean) / (std of R over the batch + 1e-8), with divisor n - 1.

    TRL calls it `scale_rewards="batch"` (arXiv:2508.08221).
    """
    scored = inputs.is_scored
    rewards = inputs.rewards.sum(1).double().where(scored, 0.0)
    sums = inputs.sum_over_replicas(torch.stack([scored.sum().double(), rewards.sum()]))
    count = sums[0]
    deviation = (rewards - sums[1] / count.clamp(min=1)) * scored
    variance = inputs.sum_over_replicas(deviation.square().sum()) / (count - 1).clamp(min=1)
    centred = dr_grpo_advantages(inputs.rewards.sum(1), scored, inputs.group_size)
    advantages = centred / (float(variance) ** 0.5 + 1e-8)
    return Advantages(advantages[:, None] * inputs.trained_mask)


def groups_that_differ(scores: list[float], scored: list[bool], group_size: int) -> list[int]:
    """Return the indices for groups whose `scored` scores are unequal, NaN or infinite."""
    differing = []
    for start in range(0, len(scores), group_size):
        members = range(start, start + group_size)
        group = [scores[i] for i in members if scored[i]]
        if len(set(group)) > 1 or not all(map(isfinite, group)):
            differing.append(start // group_size)
    return differing


def _centre(rewards: Tensor, scored: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Return fp64 rewards minus their group mean [groups, group_size], and counts [groups, 1].

    0 where not scored. In fp32 the mean over equal rewards may differ from them, and 1 / std would
    amplify that. Tensors must be on the host, because an NPU converts fp64 to fp32.
    """
    assert group_size >= 2 and len(rewards) % group_size == 0, "whole groups of two or more"
    mask = scored.view(-1, group_size)
    groups = rewards.double().view(-1, group_size).where(mask, 0.0)
    counts = mask.sum(1, keepdim=True)
    centred = groups - groups.sum(1, keepdim=True) / counts.clamp(min=1)
    return centred.where(mask, 0.0), counts


def preference_of_pairs(rewards: Tensor) -> Tensor:
    """Return [batch]: +1 for a pair's better response, -1 for the worse, 0 if equal.

    A pair's two responses are adjacent. NaN for both if one reward is NaN, or if both are inf or
    -inf.
    """
    pairs = rewards.view(-1, 2)
    difference = pairs[:, 0] - pairs[:, 1]
    sign = torch.where(difference.isnan(), difference, torch.sign(difference))
    return torch.stack((sign, -sign), 1).flatten()


def make_group_estimator(advantages: Callable[[Tensor, Tensor, int], Tensor]) -> Estimator:
    """Return an estimator with one advantage per response, on its trained tokens.

    `advantages` maps (total reward per response [batch], `is_scored`, group_size) to [batch].
    """

    def estimate(inputs: AdvantageInputs) -> Advantages:
        response_advantages = advantages(inputs.rewards.sum(1), inputs.is_scored, inputs.group_size)
        return Advantages(response_advantages[:, None] * inputs.trained_mask)

    return estimate


ESTIMATORS: dict[str, Estimator] = {
    AdvEstimator.GAE.value: gae,
    AdvEstimator.GRPO.value: make_group_estimator(grpo_advantages),
    AdvEstimator.DR_GRPO.value: make_group_estimator(dr_grpo_advantages),
    AdvEstimator.RLOO.value: make_group_estimator(rloo_advantages),
    AdvEstimator.REINFORCE_PLUS_PLUS.value: reinforce_plus_plus,
    AdvEstimator.REINFORCE_PLUS_PLUS_BASELINE.value: make_group_estimator(dr_grpo_advantages),
    AdvEstimator.REMAX.value: remax,
    AdvEstimator.OPO.value: opo,
    AdvEstimator.GPG.value: gpg,
    AdvEstimator.GRPO_BATCH.value: grpo_batch,
}
"""Name -> estimator; `config.estimators.TRAITS` has the needs of each under the same name."""


def register_estimator(name: str, traits: EstimatorTraits) -> Callable[[Estimator], Estimator]:
    """Return a decorator that makes a function a choice for `algorithm.adv_estimator`.

    `traits` say what it needs, and whether its advantages are whitened by default. Decorating
    raises ValueError if the name is in use.
    """

    def register(estimator: Estimator) -> Estimator:
        add_to(ESTIMATORS, name, "advantage estimator")(estimator)
        TRAITS[name] = traits
        return estimator

    return register
