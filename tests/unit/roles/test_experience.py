"""Advantages without a critic: which rewards, spread over which tokens, whitened when."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from mindspeed_rlxf.algorithms.masked import alone
from mindspeed_rlxf.config.enums import (
    AdvantageWhiten,
    AdvEstimator,
    KlPenalty,
    OldLogProbs,
    Role,
    Stage,
)
from mindspeed_rlxf.config.schema import ActorConfig, AlgorithmConfig
from mindspeed_rlxf.data.batch import (
    Experience,
    ExperienceInputs,
    LogProbs,
    LogProbsWithKl,
    RoleOutput,
    Rollouts,
    RuleScores,
    Scores,
    TokenLog,
    Values,
)
from mindspeed_rlxf.roles.objectives import AdvantageComputer, ClippedObjective, make_objective
from mindspeed_rlxf.roles.reports import ExperienceReport, FailedSample
from tests.rows import length_mask, rollouts_of

LIMIT = 6  # max_new_tokens
LENGTHS, HAS_EOS = [3, 5, 2, 6], [True, False, True, True]
SCORES = [1.0, 0.0, 0.25, 2.0]
KL_COEF = 0.1


def made(
    estimator: AdvEstimator, *args: Any, **how: Any
) -> tuple[Experience, ExperienceReport, torch.Tensor]:
    """Experience, report, and log-prob less reference log-prob of each token [4, 6]."""
    output, difference = output_of(estimator, *args, **how)
    assert isinstance(output.rows, Experience) and isinstance(output.report, ExperienceReport)
    return output.rows, output.report, difference


def output_of(
    estimator: AdvEstimator,
    stage: Stage = Stage.RAY_GRPO,
    greedy: tuple[Rollouts | None, Scores | None] = (None, None),
    scores: list[float] | Scores = SCORES,
    kl: torch.Tensor | None = None,  # that of the vocabulary, in place of an estimate
    policy: str = "raise",
    group_size: int = 2,
    token_log: TokenLog | None = None,
    old: LogProbs | None = None,  # else those of the rollout
    **keys: Any,
) -> tuple[RoleOutput, torch.Tensor]:
    keys = {"advantage_whiten": AdvantageWhiten.NONE, **keys}
    config: Any = SimpleNamespace(
        algorithm=AlgorithmConfig(adv_estimator=estimator, **keys),
        actor_rollout=ActorConfig.model_construct(
            max_new_tokens=LIMIT, n_samples_per_prompt=group_size
        ),
        training=SimpleNamespace(stage=stage, nan_policy=policy),
        roles=[Role.REF],
        old_log_probs=OldLogProbs.ROLLOUT,
    )
    rollouts = rollouts_of(LENGTHS, HAS_EOS)
    log_probs = -torch.rand(rollouts.response_ids.shape, generator=torch.Generator().manual_seed(1))
    ref = LogProbs(log_probs) if kl is None else LogProbsWithKl(log_probs, kl)
    rows = scores if isinstance(scores, Scores) else Scores(torch.tensor(scores))
    has_critic = (estimator, stage) == (AdvEstimator.GAE, Stage.RAY_PPO)
    values = Values(torch.linspace(-1, 1, 28).view(4, 7)) if has_critic else None
    given = rollouts, old, ref, rows, values, *greedy
    maker = AdvantageComputer(config, make_objective(config, alone), alone)
    output = maker.make(ExperienceInputs(*given, KL_COEF, LIMIT, token_log))
    mask = length_mask(rollouts.response_lengths, rollouts.response_ids.size(1))
    return output, (rollouts.rollout_log_probs - log_probs) * mask


def test_logged_tokens_have_the_numbers_of_the_experience():
    ids = rollouts_of(LENGTHS, HAS_EOS).sample_ids
    log = TokenLog("folder", 7, frozenset(ids[1:3]))
    output, difference = output_of(AdvEstimator.GRPO, token_log=log)
    assert output.token_rows is not None and isinstance(output.rows, Experience)
    lists = output.token_rows.as_lists()
    assert list(lists) == ids[1:3]
    for row in (1, 2):
        numbers, length = lists[ids[row]], LENGTHS[row]
        assert set(numbers) == {"advantage", "kl"}, "without a critic there is no value"
        assert numbers["kl"] == pytest.approx(difference[row, :length].tolist())
        assert numbers["advantage"] == output.rows.advantages[row, :length].tolist()
    assert output_of(AdvEstimator.GRPO)[0].token_rows is None, "nothing is logged unasked"


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # scores 1 0 | 0.25 2: means 0.5, 1.125
        (AdvEstimator.GRPO, [0.5**0.5, -(0.5**0.5), -(0.5**0.5), 0.5**0.5]),
        (AdvEstimator.RLOO, [1.0, -1.0, -1.75, 1.75]),
        (AdvEstimator.REINFORCE_PLUS_PLUS_BASELINE, [0.5, -0.5, -0.875, 0.875]),
    ],
)
def test_kl_in_the_loss_leaves_the_scores_alone(estimator, expected):
    experience, report, difference = made(estimator, kl_in="loss", kl_penalty=KlPenalty.MSE)
    assert_close(experience.advantages[:, 0], torch.tensor(expected))
    assert experience.ref_log_probs.shape == difference.shape, "the loss needs the reference"
    assert report.rewards.total == pytest.approx(sum(SCORES))
    mean = (difference**2 / 2).sum(1) / torch.tensor(LENGTHS)
    assert report.kl == pytest.approx(mean.tolist()), "the KL is reported all the same"


def test_the_kl_of_the_vocabulary_takes_the_place_of_an_estimate():
    kl = torch.rand(4, 6, generator=torch.Generator().manual_seed(2))
    experience, report, _ = made(AdvEstimator.DR_GRPO, kl=kl, kl_penalty=KlPenalty.FULL)
    inside = kl * experience.trained_mask
    assert report.kl == pytest.approx((inside.sum(1) / torch.tensor(LENGTHS)).tolist())
    totals = torch.tensor(SCORES) - KL_COEF * inside.sum(1)
    assert_close(experience.advantages[0, 0], (totals[0] - totals[1]) / 2)


def test_reinforce_takes_the_rewards_from_each_token_on():
    experience, _, kl = made(AdvEstimator.REINFORCE_PLUS_PLUS, gamma=0.9)
    for row, length in enumerate(LENGTHS):
        rewards = [-KL_COEF * float(value) for value in kl[row, :length]]
        if HAS_EOS[row] and length < LIMIT:  # the score has a slot of its own
            rewards.append(SCORES[row])
        else:
            rewards[-1] += SCORES[row]
        for t in range(length):
            rest = sum(0.9**i * reward for i, reward in enumerate(rewards[t:]))
            assert float(experience.advantages[row, t]) == pytest.approx(rest, abs=1e-6)
        assert not experience.advantages[row, length:].any()


def test_remax_subtracts_the_shaped_score_of_the_greedy_response():
    greedy = rollouts_of([2, 2, 4, 4], [True, True, False, False])
    baseline = Scores(torch.tensor([0.5, 0.5, 3.0, 3.0]))
    keys = {"missing_eos_penalty": 1.0, "reward_scale": 2.0}
    keys |= {"kl_in": "loss", "kl_penalty": KlPenalty.LOW_VAR_KL}
    experience, _, _ = made(AdvEstimator.REMAX, greedy=(greedy, baseline), **keys)
    # responses: 2, 0 - 1, 0.5, 4; greedy: 1, 1, 6 - 1, 6 - 1
    assert_close(experience.advantages[:, 0], torch.tensor([1.0, -2.0, -4.5, -1.0]))


def test_truncated_responses_count_in_their_group_and_are_not_trained():
    usual, _, _ = made(AdvEstimator.GRPO)
    masked, _, _ = made(AdvEstimator.GRPO, mask_truncated=True)
    assert masked.trained_mask.any(1).tolist() == HAS_EOS
    assert torch.equal(masked.advantages[0], usual.advantages[0])
    assert usual.advantages[1].any() and not masked.advantages[1].any()


def test_rejected_tokens_count_for_their_group_and_are_not_trained():
    usual, _, _ = made(AdvEstimator.GRPO)
    old = LogProbs(rollouts_of(LENGTHS, HAS_EOS).rollout_log_probs.clone())
    old.log_probs[0, 0] += 1.0
    near, report, _ = made(AdvEstimator.GRPO, old=old, rollout_rejection={"token_k2": [0.1]})
    changed = usual.trained_mask ^ near.trained_mask
    assert changed.nonzero().tolist() == [[0, 0]]
    assert torch.equal(near.advantages[0, 1:], usual.advantages[0, 1:])
    assert near.advantages[0, 0] == 0.0 and report.rejected.mean == 1 / sum(LENGTHS)


def test_rewards_are_scaled_to_variance_one_and_keep_their_mean():
    plain, before, _ = made(AdvEstimator.REINFORCE_PLUS_PLUS)
    white, after, kl = made(AdvEstimator.REINFORCE_PLUS_PLUS, whiten_rewards=True)
    slots = [n + (eos and n < LIMIT) for n, eos in zip(LENGTHS, HAS_EOS, strict=True)]
    rewards = torch.cat((-KL_COEF * kl, torch.zeros(4, 1)), 1)
    for row, count in enumerate(slots):
        rewards[row, count - 1] += SCORES[row]
    inside = torch.cat([rewards[row, :count] for row, count in enumerate(slots)])
    assert before.rewards.total == pytest.approx(float(inside.sum()), abs=1e-5)
    scaled = (inside - inside.mean()) / inside.std() + inside.mean()
    assert after.rewards.total == pytest.approx(float(scaled.sum()), abs=1e-5)
    assert not torch.allclose(plain.advantages, white.advantages)


def test_penalties_are_subtracted_after_scale_and_clip():
    keys = {"reward_scale": 4.0, "reward_clip": 3.0, "missing_eos_penalty": 0.5}
    overlong = {"overlong_buffer_len": 2, "overlong_penalty_factor": 1.0}
    _, report, _ = made(AdvEstimator.DR_GRPO, **keys, **overlong)
    # 4 -> 3, 0 - 0.5 for no EOS - 0.5 for 5 of 6 tokens, 1, 8 -> 3 - 1 for 6 of 6
    assert report.score.total == pytest.approx(3 - 1.0 + 1 + 2)


def test_a_score_that_is_no_number_is_named():
    with pytest.raises(ValueError, match="the reward gave nan for sample 2; correct"):
        made(AdvEstimator.GRPO, scores=[1.0, 0.0, float("nan"), 1.0])
    greedy = rollouts_of([2, 2, 4, 4], [True] * 4)
    broken = Scores(torch.tensor([0.0, float("inf"), 0.0, 0.0]))
    with pytest.raises(ValueError, match="the reward gave inf for sample 1; correct"):
        made(AdvEstimator.REMAX, greedy=(greedy, broken))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_where_steps_are_skipped_a_wrong_score_spoils_its_group_and_no_other(wrong):
    """Also an infinite one that clipping would turn into a number."""
    scores = [1.0, 0.0, wrong, 1.0]
    for estimator, stage in (
        (AdvEstimator.GRPO, Stage.RAY_GRPO),
        (AdvEstimator.GRPO, Stage.RAY_ONLINE_DPO),
    ):
        experience, *_ = made(estimator, stage, scores=scores, policy="skip", reward_clip=5.0)
        spoiled = experience.advantages[:, 0].isnan().tolist()
        assert spoiled == [False, False, True, True], "groups of two"


def lost_scores(scores: list[float], lost: list[int]) -> Scores:
    """Scores whose samples `lost` were not scored by a server, so that their number is made up."""
    failures = [FailedSample(i, "remote", "", True) if i in lost else None for i in range(4)]
    return RuleScores(torch.tensor(scores), [{} for _ in scores], failures)


STAGES = {"pairs": Stage.RAY_ONLINE_DPO, AdvEstimator.GAE: Stage.RAY_PPO}


@pytest.mark.parametrize("lost", [[1], [1, 2], [0, 1, 2], [0, 1, 2, 3]])
@pytest.mark.parametrize("whiten", [AdvantageWhiten.NONE, AdvantageWhiten.BATCH])
@pytest.mark.parametrize("estimator", [*AdvEstimator, "pairs"])
def test_nothing_depends_on_the_number_of_a_lost_score(estimator, whiten, lost):
    found = []
    for made_up in (0.0, 77.0):
        scores = [made_up if i in lost else score for i, score in enumerate(SCORES)]
        greedy = rollouts_of([2] * 4, [True] * 4), Scores(torch.tensor([0.5] * 4))
        experience, report, _ = made(
            AdvEstimator.GRPO if estimator == "pairs" else AdvEstimator(estimator),
            STAGES.get(estimator, Stage.RAY_GRPO),
            greedy if estimator is AdvEstimator.REMAX else (None, None),
            lost_scores(scores, lost),
            group_size=2 if estimator == "pairs" else 4,
            advantage_whiten=whiten,
        )
        found.append((vars(experience), report))
        masked = {i ^ 1 for i in lost} | set(lost) if estimator == "pairs" else set(lost)
        assert {i for i in range(4) if not experience.trained_mask[i].any()} == masked
        assert report.num_masked == len(masked) == 4 - report.score.count
        assert bool(experience.advantages.isfinite().all())
        outside = ~experience.trained_mask
        assert not experience.advantages[outside].any()
        if experience.value_mask.size(1):
            assert not experience.value_mask[sorted(masked)].any()
    (first, one), (second, two) = found
    for name in first:
        assert torch.equal(first[name], second[name]), name
    assert one == two


def test_a_lost_greedy_score_masks_the_responses_to_its_prompt():
    greedy = rollouts_of([2] * 4, [True] * 4), lost_scores([0.5] * 4, [2, 3])
    experience, report, _ = made(AdvEstimator.REMAX, greedy=greedy)
    assert experience.trained_mask.any(1).tolist() == [True, True, False, False]
    assert report.num_masked == 2


def test_a_mini_batch_whitens_its_own_advantages_by_hand():
    config: Any = SimpleNamespace(
        algorithm=AlgorithmConfig(advantage_whiten=AdvantageWhiten.MINIBATCH),
        actor_rollout=ActorConfig.model_construct(),
        roles=[],
    )
    rollouts, none = rollouts_of([3, 1, 2, 1], [True] * 4), torch.zeros(4, 0)
    raw = torch.tensor([[1.0, 2.0, 3.0], [70.0, 0, 0], [4.0, 5.0, 0.0], [-80.0, 0, 0]])
    mask = length_mask(torch.tensor([3, 1, 2, 1]), 3)
    experience = Experience(raw, mask, none, none, none, none, none.bool())
    step = ClippedObjective(config, alone).step(rollouts, experience, [0, 2], 0.0)
    _, advantages, _ = step.loss.args  # type: ignore[attr-defined]
    # Tokens 1 to 5: mean 3, variance 10 / 4. Responses of other mini-batches do not count.
    s = 2.5**-0.5
    expected = [[-2 * s, -s, 0.0], [0.0] * 3, [s, 2 * s, 0.0], [0.0] * 3]
    assert_close(advantages, torch.tensor(expected))


class AddsEntropy(ClippedObjective):
    """A plugin's objective, with an entropy term of its own."""

    def loss(self, *words: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError


@pytest.mark.parametrize(("objective", "trains"), [(ClippedObjective, False), (AddsEntropy, True)])
def test_entropies_have_gradients_where_a_loss_may_use_them(
    objective: type[ClippedObjective], trains: bool
) -> None:
    config: Any = SimpleNamespace(
        algorithm=AlgorithmConfig(), actor_rollout=ActorConfig.model_construct(), roles=[]
    )
    none = torch.zeros(1, 0)
    experience = Experience(none, none.bool(), none, none, none, none, none.bool())
    step = objective(config, alone).step(rollouts_of([1], [True]), experience, [0], 0.0)
    assert step.trains_entropy is trains
