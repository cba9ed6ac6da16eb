"""Advantages over a conversation: GAE skips observations, and credits turns by their rewards."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_rlxf.algorithms.masked import alone
from mindspeed_rlxf.config.enums import AdvantageWhiten, OldLogProbs, Role, Stage
from mindspeed_rlxf.config.schema import ActorConfig, AlgorithmConfig, RewardConfig
from mindspeed_rlxf.data.agent_record import AgentFailure, AgentRecord
from mindspeed_rlxf.data.batch import Experience, ExperienceInputs, LogProbs, Scores, Values
from mindspeed_rlxf.roles.objectives import AdvantageComputer, make_objective
from mindspeed_rlxf.roles.reports import ExperienceReport
from tests.rows import made_rollouts

VALUES = [0.5, 0.25, 9.0, 9.0, 1.0, 0.0, 9.0]
TRAINED = [True, True, False, False, True, True]
RECORD = AgentRecord("test", [(0, 2), (4, 6)], [1.0, 2.0])


def experience(
    rewards: dict[str, Any], observation_log_prob: float = 0.0, **algorithm: Any
) -> tuple[Experience, ExperienceReport]:
    """Of two conversations of two turns, tokens 0 and 1, 4 and 5; the second one has failed."""
    failure = AgentFailure("timeout", "too late")
    failed = AgentRecord("test", RECORD.turns, RECORD.rewards, failure=failure)
    log_probs = torch.full((2, 6), -0.5)
    log_probs[:, 2:4] = observation_log_prob
    rollouts = made_rollouts(
        prompt_ids=torch.ones(2, 2, dtype=torch.long),
        prompt_lengths=torch.full((2,), 2),
        response_ids=torch.ones(2, 6, dtype=torch.long),
        response_mask=torch.ones(2, 6, dtype=torch.bool),
        trained_mask=torch.tensor([TRAINED, [False] * 6]),
        has_eos=torch.tensor([True, False]),
        rollout_log_probs=log_probs,
        data_sources=["sums", "sums"],
        extra_infos=[RECORD.add_to({}), failed.add_to({})],
    )
    keys = {"gamma": 0.5, "lam": 0.5, "score_position": "eos", **algorithm}
    config: Any = SimpleNamespace(
        algorithm=AlgorithmConfig(advantage_whiten=AdvantageWhiten.NONE, **keys),
        actor_rollout=ActorConfig.model_construct(max_new_tokens=6),
        reward=RewardConfig.model_validate({"kind": "rule", **rewards}),
        training=SimpleNamespace(stage=Stage.RAY_PPO, nan_policy="raise"),
        roles=[Role.REF],
        old_log_probs=OldLogProbs.ROLLOUT,
    )
    weight = config.reward.agent_weight("sums")
    inputs = ExperienceInputs(
        rollouts,
        None,
        LogProbs(torch.full((2, 6), -0.5)),
        Scores(torch.tensor([weight * 3.0, 0.0])),
        Values(torch.tensor([VALUES, VALUES])),
        None,
        None,
        0.1,
        6,
    )
    output = AdvantageComputer(config, make_objective(config, alone), alone).make(inputs)
    assert isinstance(output.rows, Experience)
    return output.rows, output.report


BY_RULE = {"rules": {"sums": "agent"}}
# TD errors of tokens 0, 1, 4, 5 with rewards r1 and r5, and values 0.5, 0.25, 1, 0:
# 0.5 * 0.25 - 0.5 = -0.375;  r1 + 0.5 * 1 - 0.25 = r1 + 0.25;  0.5 * 0 - 1 = -1;  r5 - 0
# Advantages add a quarter (gamma times lambda) of the next one.
AT_THE_TURNS = [-0.375 + 1.125 / 4, 1.25 - 0.5 / 4, -1 + 2 / 4, 2.0]  # r1 = 1, r5 = 2
AT_THE_END = [-0.375 + 0.1875 / 4, 0.25 - 0.25 / 4, -1 + 3 / 4, 3.0]  # r1 = 0, r5 = 3


@pytest.mark.parametrize(("turn_rewards", "expected"), [(True, AT_THE_TURNS), (False, AT_THE_END)])
def test_gae_goes_from_the_end_of_a_turn_to_the_next_turn(
    turn_rewards: bool, expected: list[float]
) -> None:
    made, report = experience(BY_RULE, turn_rewards=turn_rewards)
    assert report.kl == [0.0] and report.num_masked == 1, "the failed one has no KL"
    assert made.advantages[0, [0, 1, 4, 5]].tolist() == pytest.approx(expected)
    assert made.advantages[0, 2:4].tolist() == [0.0, 0.0]
    returns = made.returns[0, [0, 1, 4, 5]] - torch.tensor(VALUES)[[0, 1, 4, 5]]
    assert returns.tolist() == pytest.approx(expected)
    assert not made.trained_mask[1].any() and not made.advantages[1].any()
    assert made.value_mask[0].tolist() == [*TRAINED, False] and not made.value_mask[1].any()


def test_the_rewards_of_turns_are_scaled_and_weighted_as_the_score_is() -> None:
    """The advantages of values 0 would be linear in the rewards; these are linear beside them."""
    function = {"function": {"function": "agent", "name": "agent", "weight": 2.0}}
    weighted, _ = experience(function, turn_rewards=True)
    scaled, _ = experience(BY_RULE, turn_rewards=True, reward_scale=2.0)
    assert weighted.advantages.equal(scaled.advantages)
    plain, _ = experience(BY_RULE, turn_rewards=True)
    none, _ = experience(BY_RULE, turn_rewards=True, reward_scale=0.0)
    change = plain.advantages - none.advantages
    assert torch.allclose(scaled.advantages, none.advantages + 2 * change)


@pytest.mark.parametrize("turn_rewards", [False, True])
def test_log_probs_of_observations_change_no_advantage(turn_rewards: bool) -> None:
    one, _ = experience(BY_RULE, 0.0, turn_rewards=turn_rewards)
    other, _ = experience(BY_RULE, -9.0, turn_rewards=turn_rewards)
    for name in ("advantages", "returns", "trained_mask", "value_mask"):
        assert getattr(one, name).equal(getattr(other, name)), name
    trained = one.trained_mask
    assert one.old_log_probs[trained].equal(other.old_log_probs[trained])
