"""The critic's loss of a micro-batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_rlxf.config.enums import LossNormalizer, OldLogProbs, Stage
from mindspeed_rlxf.config.schema import ActorConfig, AlgorithmConfig, CriticConfig
from mindspeed_rlxf.data.batch import Experience
from mindspeed_rlxf.roles.critic import CriticRole


def test_sums_of_a_response_are_divided_by_its_largest_length() -> None:
    config: Any = SimpleNamespace(
        algorithm=AlgorithmConfig(loss_normalizer=LossNormalizer.SEQUENCE_SUMS),
        actor_rollout=ActorConfig.model_construct(max_new_tokens=4),
        training=SimpleNamespace(stage=Stage.RAY_PPO, nan_policy="raise"),
        value_model=CriticConfig.model_construct(vf_coef=0.5, cliprange_value=None),
        old_log_probs=OldLogProbs.RECOMPUTE,
    )
    engine: Any = SimpleNamespace(sum_over_replicas=None)
    critic = CriticRole(config, lambda _config, _role: engine)
    none, slots = torch.zeros(2, 0), torch.tensor([[True, True], [True, False]])
    rows = Experience(none, none.bool(), none, none, torch.zeros(2, 2), torch.zeros(2, 2), slots)
    output = critic.loss(rows, [0, 1], torch.tensor([1.0, 2.0, 2.0]))
    # (0.5 * 1 + 0.5 * 4) / 4 and (0.5 * 4) / 4, weighed by 0.5
    assert float(output.loss) == pytest.approx(0.5 * (0.625 + 0.5))
    assert output.weight == 2
    assert float(output.metrics["vf_loss"].total) == pytest.approx(0.625 + 0.5)
