"""One decode step of the model: a token of each row, without what a training step needs.

Megatron's modules hold the weights; the arithmetic is theirs, operator by operator and in their
order, so that bf16 rounds alike. Left out are its checks and reshaping in every layer, which cost
most of a decode step's time on the host. Where the device has fused norms and MLPs, Megatron's
module computes the part; it does for experts too whose weights no grouped product can take. Experts
that ranks share are computed as in a prefill (`shared_experts.py`).

Axes: rows = sequences, groups = key-value groups of this rank, d = width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mindspeed_rlxf import device
from mindspeed_rlxf.models.attention import Attend
from mindspeed_rlxf.models.grouped_experts import GroupedExperts
from mindspeed_rlxf.models.rope import rotary_angles
from mindspeed_rlxf.models.shared_experts import SharedExperts
from mindspeed_rlxf.models.transformer import TransformerModel

SMALL = 2**16  # numbers of a weight
_ONE_DNN = (
    getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if torch.backends.mkldnn.is_available()
    else None
)


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply a few rows by a weight; as `F.linear`, without a gradient.

    On a CPU in fp32 by oneDNN: with 16 rows MKL, which `F.linear` calls, takes 1.2 to 2 times as
    long. A call costs more, so that small weights are left to MKL.
    """
    on_cpu = hidden.device.type == "cpu" and hidden.dtype is torch.float32
    if _ONE_DNN is None or not on_cpu or weight.numel() < SMALL:
        return F.linear(hidden, weight, bias)
    return _ONE_DNN(hidden, weight, bias, "none", [], "")  # type: ignore[no-any-return]


class Decoder:
    """The layers of a model, ready for decode steps while its weights stay where they are."""

    def __init__(self, model: TransformerModel, max_length: int) -> None:
        """max_length: positions are below it"""
        config = model.config
        self.model, self.head_dim = model, config.kv_channels
        self.tp = model.tp_group.size()
        self.layers = [_Layer(layer, self) for layer in model.decoder.layers]
        where = next(model.parameters()).device
        angles = rotary_angles(
            torch.arange(max_length, device=where), model.inverse_frequencies.to(where)
        ).flatten(1)
        # Rotation by halves, (x, y) -> (x cos - y sin, y cos + x sin), of the vector and itself
        # with its halves swapped.
        signs = torch.ones_like(angles[:1])
        signs[:, : self.head_dim // 2] = -1
        self._rotations = torch.stack((angles.cos(), angles.sin() * signs)).to(config.params_dtype)

    def __call__(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Compute the last hidden states [rows, hidden] of tokens [rows] at positions [rows]."""
        hidden = self.model.embedding.word_embeddings(token_ids)
        cos, sin = self._rotations[:, positions, None, None, :].unbind()
        for number, layer in enumerate(self.layers, start=1):
            hidden = layer.forward(hidden, number, cos, sin, attend)
        norm = self.model.decoder.final_layernorm
        assert norm is not None, "a model that generates has all its layers"
        return norm(hidden)  # type: ignore[no-any-return]

    def sum_over_ranks(self, partial: Tensor) -> Tensor:
        """Sum what the tensor-parallel ranks computed from their parts of a weight."""
        if self.tp > 1:
            dist.all_reduce(partial, group=self.model.tp_group)
        return partial


class _Layer:
    """One layer's weights and norms."""

    def __init__(self, layer: Any, decoder: Decoder) -> None:
        attention, config = layer.self_attention, layer.config
        self.sum_over_ranks, self.head_dim = decoder.sum_over_ranks, decoder.head_dim
        self.attention_norm, self.mlp_norm = layer.input_layernorm, layer.pre_mlp_layernorm
        self.attention = attention
        self.query_norm, self.key_norm = attention.q_layernorm, attention.k_layernorm
        self.qkv, self.qkv_bias = attention.linear_qkv.weight, attention.linear_qkv.bias
        self.out = attention.linear_proj.weight
        self.groups = config.num_query_groups // decoder.tp  # 0 where ranks share one
        self.mlp = layer.mlp
        self.is_plain = config.num_moe_experts is None and not device.fuses_layers()
        has_all_experts = not (self.is_plain or isinstance(layer.mlp, SharedExperts))
        grouped = has_all_experts and not device.fuses_layers()
        self.experts = GroupedExperts.of(layer.mlp) if grouped else None

    def forward(
        self, hidden: Tensor, number: int, cos: Tensor, sin: Tensor, attend: Attend
    ) -> Tensor:
        """[rows, hidden] -> [rows, hidden]. cos, sin: [rows, 1, 1, d]"""
        rotated, value = self._projections(self.attention_norm(hidden))
        half = self.head_dim // 2
        rotated = rotated * cos + rotated.roll(half, -1) * sin
        query, key = rotated[:, :, :-1], rotated[:, :, -1]
        attended = attend.attend(number, query, key, value).reshape(len(hidden), -1)
        hidden = hidden + self.sum_over_ranks(linear(attended, self.out))
        return hidden + self._mlp(self.mlp_norm(hidden))

    def _projections(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and the key of each group [rows, groups, heads + 1, d], and values."""
        if not self.groups:
            query, key, value = self.attention.get_query_key_value_tensors(hidden[:, None])
            return torch.cat((query, key), 2), value[:, 0]  # the second axis is the one group
        heads = linear(hidden, self.qkv, self.qkv_bias)
        heads = heads.view(len(hidden), self.groups, -1, self.head_dim)
        value = heads[:, :, -1]
        if self.query_norm is None:
            return heads[:, :, :-1], value
        query, key = self.query_norm(heads[:, :, :-2]), self.key_norm(heads[:, :, -2:-1])
        return torch.cat((query, key), 2), value

    def _mlp(self, hidden: Tensor) -> Tensor:
        if self.experts is not None:
            return self.sum_over_ranks(self.experts(hidden))
        if not self.is_plain:
            return self.mlp(hidden[:, None])[0].squeeze(1)  # type: ignore[no-any-return]
        gate, up = linear(hidden, self.mlp.linear_fc1.weight).chunk(2, dim=-1)
        return self.sum_over_ranks(linear(F.silu(gate) * up, self.mlp.linear_fc2.weight))
