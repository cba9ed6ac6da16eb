"""A response with tokens that the policy was given: what both roles learn, by hand.

Row 0: a, (x, y given), EOS. Row 1: c, (z given), without EOS. Numbers of given tokens are junk.
"""

from collections.abc import Sequence
from math import exp, log, log1p, nan
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from mindspeed_rlxf.algorithms.losses import LossOutput
from mindspeed_rlxf.algorithms.masked import alone
from mindspeed_rlxf.config.enums import AdvantageWhiten, LossNormalizer, OldLogProbs, Role, Stage
from mindspeed_rlxf.config.schema import ActorConfig, AlgorithmConfig, CriticConfig, TrainingConfig
from mindspeed_rlxf.data.batch import (
    Experience,
    ExperienceInputs,
    LogProbs,
    Rollouts,
    Scores,
    Values,
)
from mindspeed_rlxf.engine.train_engine import PolicyStep, TokenLogProbs, ValueStep
from mindspeed_rlxf.roles.actor import ActorRole
from mindspeed_rlxf.roles.critic import CriticRole
from mindspeed_rlxf.roles.objectives import PairObjective
from mindspeed_rlxf.roles.reports import ExperienceReport
from tests.rows import made_rollouts

JUNK = 9.0
TRAINED = torch.tensor([[True, False, False, True], [True, False, False, False]])
THERE = torch.tensor([[True] * 4, [True, True, False, False]])
OLD = torch.tensor([[-1.0, JUNK, JUNK, -2.0], [-0.5, JUNK, 0, 0]])
REF = torch.tensor([[-1.5, -JUNK, -JUNK, -1.0], [-0.5, -JUNK, 0, 0]])
VALUES = torch.tensor([[0.2, JUNK, JUNK, 0.3, 0.4], [0.5, JUNK, JUNK, 0, 0]])
SCORES = torch.tensor([1.0, 2.0])
KL_COEF, LIMIT = 0.1, 8
# What the engine reads of a, EOS and c: the ratios are 1.5, 1 and 0.5.
NEW = TokenLogProbs(
    torch.tensor([log(1.5) - 1, -2.0, log(0.5) - 0.5]), torch.tensor([3.0, 1.0, 2.0])
)
NEW_VALUES = torch.tensor([0.5, 0.3, 0.8, 0.5])  # of slots 0, 3 and 4 of row 0, and 0 of row 1


class Engine:
    """Answers every step with the same log-probs and values, and keeps the loss."""

    def __init__(self, config: object, role: Role) -> None:
        self.outputs: list[LossOutput] = []
        self.sum_over_replicas = alone

    def log_probs(self, rollouts: Rollouts, temperature: float) -> LogProbs:
        return LogProbs(OLD)

    def micro_batches(self, rollouts: Rollouts, rows: Sequence[int]) -> list[list[int]]:
        return [list(rows)]

    def train_step(
        self, micro_batches: list[list[int]], step: PolicyStep | ValueStep
    ) -> dict[str, float]:
        (rows,) = micro_batches
        if isinstance(step, PolicyStep):
            self.outputs.append(step.loss(rows, NEW))
        else:
            assert int(step.slots.sum()) == len(NEW_VALUES)
            self.outputs.append(step.loss(rows, NEW_VALUES))
        return {}

    def end_iteration(self) -> float:
        return 0.0


def roles(
    stage: Stage = Stage.RAY_PPO, normalizer: LossNormalizer = LossNormalizer.MINIBATCH_TOKENS
) -> tuple[Any, Any]:
    class Config:
        algorithm = AlgorithmConfig(
            gamma=0.9, lam=0.5, advantage_whiten=AdvantageWhiten.NONE, loss_normalizer=normalizer
        )
        actor_rollout = ActorConfig.model_construct(
            max_new_tokens=LIMIT, n_samples_per_prompt=2, entropy_coeff=0.1
        )
        value_model = CriticConfig.model_construct(cliprange_value=0.2, vf_coef=0.5)
        training = TrainingConfig.model_construct(stage=stage)
        parts = None
        old_log_probs = OldLogProbs.RECOMPUTE

    config: Any = Config()
    return ActorRole(config, Engine), CriticRole(config, Engine)  # type: ignore[arg-type]


def rollouts() -> Rollouts:
    return made_rollouts(
        prompt_ids=torch.ones(2, 1, dtype=torch.long),
        prompt_lengths=torch.tensor([1, 1]),
        response_ids=torch.ones(2, 4, dtype=torch.long) * THERE,
        response_mask=THERE,
        trained_mask=TRAINED,
        has_eos=torch.tensor([True, False]),
        rollout_log_probs=OLD + 0.25 * TRAINED,
    )


def made(role: Any) -> tuple[Experience, ExperienceReport]:
    values = None if isinstance(role.experience.objective, PairObjective) else Values(VALUES)
    given = rollouts(), LogProbs(OLD), LogProbs(REF), Scores(SCORES), values, None, None
    output = role.make_experience(ExperienceInputs(*given, KL_COEF, LIMIT))
    return output.rows, output.report


def learnt(role: Any, update: str) -> LossOutput:
    experience, _ = made(role)
    getattr(role, update)(rollouts(), experience, [[0, 1]])
    (output,) = role.engine.outputs
    return output  # type: ignore[no-any-return]


def test_advantages_returns_and_kl():
    # KL a: -1 + 1.5 = 0.5, EOS: -2 + 1 = -1, c: 0. Rewards a -0.05, EOS 0.1, the slot after it 1;
    # c takes the score of its row, 2. gamma 0.9, gamma lambda 0.45:
    # A_4 = 1 - 0.4                               = 0.6
    # A_3 = 0.1 + 0.9 * 0.4 - 0.3 + 0.45 * 0.6    = 0.43
    # A_0 = -0.05 + 0.9 * 0.3 - 0.2 + 0.45 * 0.43 = 0.2135
    # c:    2 - 0.5                               = 1.5
    experience, report = made(roles()[1])
    assert_close(experience.advantages, torch.tensor([[0.2135, 0, 0, 0.43], [1.5, 0, 0, 0]]))
    returns = [[0.4135, 0, 0, 0.73, 1.0], [2.0, 0, 0, 0, 0]]
    assert_close(experience.returns, torch.tensor(returns))
    assert not experience.values[~experience.value_mask].any()
    assert report.kl == pytest.approx([-0.25, 0.0])
    assert report.rewards.total == pytest.approx(-0.05 + 0.1 + 1 + 2)
    assert (report.advantages.count, report.advantages.largest) == (3, 1.5)


@pytest.mark.parametrize(
    ("normalizer", "loss", "weight"),
    [
        # a: 1.2 (clipped) * 0.2135, EOS: 0.43, c: 0.5 * 1.5 = 0.75; then 0.1 of each entropy
        (LossNormalizer.MINIBATCH_TOKENS, -0.2562 - 0.43 - 0.75 - 0.1 * 6, 3),
        (LossNormalizer.SEQUENCE_MEANS, -(0.2562 + 0.43 + 0.1 * 4) / 2 - 0.75 - 0.1 * 2, 2),
    ],
)
def test_the_policy_learns_from_its_own_tokens(normalizer, loss, weight):
    output = learnt(roles(normalizer=normalizer)[0], "update_policy")
    assert float(output.loss) == pytest.approx(loss, rel=1e-5) and output.weight == weight
    entropy = output.metrics["entropy"]
    assert (float(entropy.total), entropy.weight) == (6.0, 3)
    ppo_kl = float(output.metrics["ppo_kl"].total)
    assert ppo_kl == pytest.approx(-log(1.5) - log(0.5), rel=1e-5)


@pytest.mark.parametrize(
    ("normalizer", "divisor", "weight"),
    [(LossNormalizer.MINIBATCH_TOKENS, 1, 4), (LossNormalizer.SEQUENCE_SUMS, LIMIT, 2)],
)
def test_the_critic_learns_the_slots_of_these_tokens(normalizer, divisor, weight):
    output = learnt(roles(normalizer=normalizer)[1], "update_critic")
    # 0.5 * (0.5 - 0.4135)^2, 0.5 * (0.3 - 0.73)^2, 0.5 * (0.6 - 1)^2 (clipped), 0.5 * (0.5 - 2)^2
    loss = (0.00374113 + 0.09245 + 0.08 + 1.125) / divisor
    assert float(output.loss) == pytest.approx(0.5 * loss, rel=1e-5)
    assert float(output.metrics["vf_loss"].total) == pytest.approx(loss, rel=1e-5)
    assert output.weight == weight


def test_a_preferred_response_is_its_own_tokens():
    # Log-ratios: row 0 (log 1.5 - 1 + 1.5) + (-2 + 1), row 1 log 0.5, which scores better.
    output = learnt(roles(Stage.RAY_ONLINE_DPO)[0], "update_policy")
    margin = 0.1 * (log(0.5) - (log(1.5) - 0.5))
    assert float(output.loss) == pytest.approx(log1p(exp(-margin)), rel=1e-5)


def test_log_probs_of_training_and_generation_are_compared_on_these_tokens():
    role = roles()[0]
    gap = role.log_probs(rollouts()).report.gap
    assert (gap.count, gap.largest, gap.smallest) == (3, 0.25, 0.25)


@pytest.mark.parametrize(
    ("row", "token", "gap", "place"),
    [
        (0, 3, 0.75, "differ by 0.75 at response token 3 (id 1) of sample 0"),
        (1, 0, nan, "differ by nan at response token 0 (id 1) of sample 1"),
    ],
)
def test_a_gap_over_the_limit_names_the_worst_token(row, token, gap, place):
    role, given = roles()[0], rollouts()
    role.algorithm = role.algorithm.model_copy(update={"max_log_prob_gap": 0.5})
    role.log_probs(given)
    given.rollout_log_probs[row, token] = OLD[row, token] - gap
    with pytest.raises(ValueError, match=r"over algorithm.max_log_prob_gap=0.5") as caught:
        role.log_probs(given)
    assert place in str(caught.value)
