"""What a micro-batch tells Megatron's schedule."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_rlxf.algorithms.losses import LossOutput
from mindspeed_rlxf.engine import schedule


@pytest.mark.parametrize(("rank", "counted"), [(None, 7), (0, 7), (1, 0)])
def test_context_parallel_ranks_count_the_weight_of_their_rows_once(
    monkeypatch: pytest.MonkeyPatch, rank: int | None, counted: int
) -> None:
    """Megatron adds the weights of all ranks, of which those of a group have the same rows."""
    output = LossOutput(torch.tensor(3.0), weight=7, metrics={})
    group = None if rank is None else SimpleNamespace(rank=lambda: rank)
    batch = SimpleNamespace(own_token_ids=None, own_positions=None, attend=None, cp=group)

    def run_one(
        forward_step_func: Callable[..., Any], data_iterator: Any, model: Any, **_: Any
    ) -> Any:
        hidden, loss = forward_step_func(data_iterator[0], model[0])
        return loss(hidden)

    monkeypatch.setattr(schedule, "get_forward_backward_func", lambda: run_one)
    monkeypatch.setattr(schedule, "await_gathers", lambda model: None)
    monkeypatch.setattr(schedule, "set_balance_loss_weight", lambda weight: None)

    def model(*_: Any) -> torch.Tensor:
        return torch.zeros(1)

    loss, weight, _ = schedule.run_schedule([model], model, [batch], lambda *_: output)  # type: ignore
    assert (float(loss), int(weight)) == (3.0, counted)
