"""The gate on the gap between the log-probs of generation and of training."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_rlxf.config.schema import AlgorithmConfig
from mindspeed_rlxf.data.batch import LogProbs, Rollouts
from mindspeed_rlxf.roles.actor import ActorRole
from mindspeed_rlxf.roles.reports import LogProbReport
from tests.rows import made_rollouts

MASK = torch.tensor([[True, True, False], [True, True, True]])


def rollouts() -> Rollouts:
    """Two responses of 2 and 3 tokens."""
    return made_rollouts(
        prompt_ids=torch.ones(2, 1, dtype=torch.long),
        prompt_lengths=torch.tensor([1, 1]),
        response_ids=torch.tensor([[5, 6, 0], [7, 8, 9]]),
        response_mask=MASK,
        trained_mask=MASK,
        has_eos=torch.tensor([False, False]),
        rollout_log_probs=torch.tensor([[-1.0, -2.0, 0.0], [-3.0, -4.0, -5.0]]),
        sample_ids=[40, 41],
    )


def recomputed(**changes: float) -> LogProbs:
    """As generated, but for the places `r<row>t<token>`."""
    log_probs = rollouts().rollout_log_probs.clone()
    for place, value in changes.items():
        log_probs[int(place[1]), int(place[3])] = value
    return LogProbs(log_probs)


def log_probs(limit: float | None, **changes: float) -> LogProbReport:
    role: Any = SimpleNamespace(
        engine=SimpleNamespace(log_probs=lambda *_: recomputed(**changes)),
        config=SimpleNamespace(logit_temperature=1.0),
        algorithm=AlgorithmConfig(max_log_prob_gap=limit),
    )
    report: LogProbReport = ActorRole.log_probs(role, rollouts()).report
    return report


def test_gaps_are_those_of_response_tokens() -> None:
    gap = log_probs(None, r0t1=-2.5, r0t2=9.0, r1t0=-2.0).gap
    assert (gap.count, gap.total, gap.largest, gap.smallest) == (5, 1.5, 1.0, 0.0)


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"r0t1": -2.5, "r1t1": -4.6}, "differ by 0.6 at response token 1 (id 8) of sample 41"),
        ({"r0t0": -1.7}, "differ by 0.7 at response token 0 (id 5) of sample 40"),
        ({"r1t2": float("nan")}, "differ by nan at response token 2 (id 9) of sample 41"),
    ],
)
def test_a_gap_over_the_limit_names_the_worst_token(changes: dict[str, float], place: str) -> None:
    with pytest.raises(ValueError, match=r"over algorithm.max_log_prob_gap=0.5") as caught:
        log_probs(0.5, **changes)
    assert place in str(caught.value)
    log_probs(0.5, r0t1=-2.5)
