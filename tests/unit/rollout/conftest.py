from typing import Any

import pytest
import torch

from mindspeed_rlxf.rollout import generation

# Tensors here are tiny: threads that wait for each other on a busy machine cost seconds.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def whole_model_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Decoder` takes Megatron's layers apart, which this model has not."""

    def of(model: Any, _max_length: int) -> Any:
        return lambda ids, positions, attend: model(ids[None], positions, attend).squeeze(1)

    monkeypatch.setattr(generation, "Decoder", of)
