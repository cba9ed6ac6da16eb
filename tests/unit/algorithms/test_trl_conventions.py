"""The critic's experience equals TRL's, which is written out here over padded tensors.

In TRL (experimental.ppo 1.12.0) padded log-probs are 1, the score is one slot after EOS where the
batch is wide enough, and GAE runs over the whole width without a mask.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from mindspeed_rlxf.algorithms.masked import alone
from mindspeed_rlxf.config.enums import (
    OldLogProbs,
    Stage,
)
from mindspeed_rlxf.config.schema import ActorConfig, AlgorithmConfig
from mindspeed_rlxf.data.batch import (
    Experience,
    ExperienceInputs,
    LogProbs,
    Rollouts,
    Scores,
    Values,
)
from mindspeed_rlxf.roles.objectives import AdvantageComputer, make_objective
from tests.rows import rollouts_of

KL_COEF = 0.1


def inputs(rollouts: Rollouts, seed: int = 1) -> tuple[LogProbs, Values, Scores]:
    """With numbers also where padded, which have to leave no trace."""
    rows, width = rollouts.response_ids.shape
    generator = torch.Generator().manual_seed(seed)
    ref = -torch.rand(rows, width, generator=generator)
    values = torch.randn(rows, width + 1, generator=generator)
    return LogProbs(ref), Values(values), Scores(torch.randn(rows, generator=generator))


def make_experience(
    rollouts: Rollouts, slot_limit: int, algorithm: AlgorithmConfig
) -> tuple[Experience, object]:
    ref, values, scores = inputs(rollouts)
    config = SimpleNamespace(
        algorithm=algorithm,
        actor_rollout=ActorConfig.model_construct(max_new_tokens=slot_limit),
        training=SimpleNamespace(stage=Stage.RAY_PPO, nan_policy="raise"),
        old_log_probs=OldLogProbs.ROLLOUT,
    )
    objective = make_objective(config, alone)  # type: ignore[arg-type]
    maker = AdvantageComputer(config, objective, alone)  # type: ignore[arg-type]
    given = rollouts, None, ref, scores, values, None, None
    output = maker.make(ExperienceInputs(*given, KL_COEF, slot_limit))
    assert isinstance(output.rows, Experience)
    return output.rows, output.report


def trl(rollouts: Rollouts, gamma: float, lam: float, penalty: float) -> dict[str, Tensor]:
    """TRL's steps in its order, on [batch, T] tensors."""
    ref, values, scores = inputs(rollouts)
    width = rollouts.response_ids.size(1)
    last = rollouts.response_lengths - 1
    padding = torch.arange(width)[None, :] > last[:, None]
    padding_p1 = torch.arange(width)[None, :] > (last + 1)[:, None]
    old = rollouts.rollout_log_probs.masked_fill(padding, 1.0)
    reference = ref.log_probs.masked_fill(padding, 1.0)
    v = values.values[:, :width].masked_fill(padding_p1, 0.0)
    rewards = -KL_COEF * (old - reference)
    score = scores.scores.clone()
    score[~rollouts.has_eos] -= penalty
    for row in range(len(last)):
        place = last[row] + 1 if last[row] + 1 < width else last[row]
        rewards[row, place] += score[row]
    advantages, following = torch.zeros_like(v), torch.zeros(len(last))
    for t in reversed(range(width)):
        next_value = v[:, t + 1] if t + 1 < width else torch.zeros(len(last))
        following = rewards[:, t] + gamma * next_value - v[:, t] + gamma * lam * following
        advantages[:, t] = following
    returns = advantages + v
    inside = advantages[~padding]
    white = (advantages - inside.mean()) * torch.rsqrt(inside.var(unbiased=True) + 1e-8)
    return {
        "advantages": white.masked_fill(padding, 0.0),
        "returns": returns.masked_fill(padding_p1, 0.0),
        "values": v,
        "value_mask": ~padding_p1,
    }


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8)])
def test_experience_is_trls_at_its_batch_width(gamma: float, lam: float) -> None:
    # EOS early, EOS in the last column, cut at the width, one token only
    rollouts = rollouts_of([3, 5, 5, 1], [True, True, False, True])
    algorithm = AlgorithmConfig(gamma=gamma, lam=lam, missing_eos_penalty=1.0)
    ours, _ = make_experience(rollouts, 5, algorithm)
    theirs = trl(rollouts, gamma, lam, penalty=1.0)
    assert_close(ours.advantages, theirs["advantages"])
    assert not ours.value_mask[:, 5].any() and not ours.values[:, 5].any()
    for name in ("returns", "values", "value_mask"):
        assert_close(getattr(ours, name)[:, :5], theirs[name], msg=name)
