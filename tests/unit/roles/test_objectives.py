"""What an optimizer step of the clipped objective reads."""

from types import SimpleNamespace
from typing import Any

import torch
from torch.testing import assert_close

from mindspeed_rlxf.algorithms.masked import alone
from mindspeed_rlxf.config.enums import AdvantageWhiten
from mindspeed_rlxf.config.schema import ActorConfig, AlgorithmConfig
from mindspeed_rlxf.data.batch import Experience
from mindspeed_rlxf.roles.objectives import ClippedObjective
from tests.rows import length_mask, rollouts_of


def test_a_mini_batch_whitens_its_own_advantages_by_hand() -> None:
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
