"""The last layer of a sharded model, as `engine.head_outputs` uses it."""

from types import SimpleNamespace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from mindspeed_rlxf.engine.fsdp.model import linear_of


class ShardedOutputHead:
    """A `head_outputs.OutputHead`; every rank computes with the whole layer."""

    tp_group: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)  # no tensor-parallel group

    def __init__(self, model: Any, fp32_head: bool) -> None:
        self._model = model
        self.linear = linear_of(model, fp32_head)

    @property
    def output_weight(self) -> Tensor:
        """The layer's weight, gathered while the model runs."""
        weight: Tensor = self._model.lm_head.weight
        return weight

    @property
    def vocab_size(self) -> int:
        """Rows of the layer."""
        return len(self.output_weight)

    def full_hidden(self, hidden: Tensor, partial_gradient: bool) -> Tensor:
        """Return `hidden`, which has all tokens."""
        return hidden

    def score(self, states: Tensor) -> Tensor:
        """Score hidden states: [tokens, hidden] -> [tokens] fp32."""
        return F.linear(states.float(), self.output_weight.float())[:, 0]
