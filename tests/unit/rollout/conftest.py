from typing import Any

import pytest
import torch

from mindspeed_rlxf.rollout import generation

# Tensors of these tests are tiny: on a busy machine several threads only wait for each other.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def whole_model_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace `Decoder`, which needs Megatron's layers, by a call of the tests' whole model."""

    def of(model: Any, _max_length: int) -> Any:
        return lambda ids, positions, attend: model(ids[None], positions, attend).squeeze(1)

    monkeypatch.setattr(generation, "Decoder", of)
