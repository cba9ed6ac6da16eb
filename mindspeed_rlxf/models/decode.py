"""One decode step: each row's next hidden state from its last token.

Uses the weights in Megatron's modules, and its operators in its order, so bf16 rounds alike. Skips
Megatron's per-layer checks and reshaping, which dominate a decode step's host time. The model's own
modules compute norms, fused MLPs, and experts whose weights no grouped GEMM can take. Shared
experts run as in a prefill (`shared_experts.py`).

Adapters compute beside the weights, as in training: merged in bf16 most of a small update is lost.

Axes: rows = sequences, groups = key-value groups on this rank, d = head width.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mindspeed_rlxf import device
from mindspeed_rlxf.models.adapter_parameters import ADAPTERS
from mindspeed_rlxf.models.attention import Attend, rotary_angles
from mindspeed_rlxf.models.grouped_experts import ExpertWeights, routed_experts
from mindspeed_rlxf.models.shared_experts import SharedExperts
from mindspeed_rlxf.models.transformer import TransformerModel

SMALL = 2**16  # a weight with fewer elements is small
_ONE_DNN = (
    getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if torch.backends.mkldnn.is_available()
    else None
)


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Like `F.linear`, but faster for a few rows; without gradients.

    In fp32 on CPU it calls oneDNN: with 16 rows MKL (`F.linear`) takes 1.2 to 2 times as long. A
    oneDNN call costs more, so MKL keeps the small weights.
    """
    on_cpu = hidden.device.type == "cpu" and hidden.dtype is torch.float32
    if _ONE_DNN is None or not on_cpu or weight.numel() < SMALL:
        return F.linear(hidden, weight, bias)
    return _ONE_DNN(hidden, weight, bias, "none", [], "")  # type: ignore[no-any-return]


class Decoder:
    """Runs decode steps for a model whose weights stay in place meanwhile."""

    def __init__(self, model: TransformerModel, max_length: int) -> None:
        """View the weights, and compute rotary factors for positions below `max_length`."""
        config = model.config
        self.model = model
        self.head_dim = config.kv_channels
        self.tp = model.tp_group.size()
        self.layers = [_Layer(layer, self) for layer in model.decoder.layers]
        target = next(model.parameters()).device
        positions = torch.arange(max_length, device=target)
        angles = rotary_angles(positions, model.inverse_frequencies.to(target)).flatten(1)
        # (x, y) -> (x cos - y sin, y cos + x sin) for the halves x, y of a head: the head times
        # cos, plus the head with its halves swapped times (-sin, sin).
        signs = torch.ones_like(angles[:1])
        signs[:, : self.head_dim // 2] = -1
        self._rotations = torch.stack((angles.cos(), angles.sin() * signs)).to(config.params_dtype)

    def __call__(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return the last layer's normed hidden states [rows, hidden].

        Args:
            token_ids: [rows] int64, each row's new token.
            positions: [rows] int64, its position.
            attend: stores each row's new key and value, and attends to all its tokens; gets queries
                as [rows, groups, heads per group, d].
        """
        hidden = self.model.embedding.word_embeddings(token_ids)
        cos, sin = self._rotations[:, positions, None, None, :].unbind()
        for number, layer in enumerate(self.layers, start=1):
            hidden = layer.forward(hidden, number, cos, sin, attend)
        norm = self.model.decoder.final_layernorm
        assert norm is not None, "a model that generates has all its layers"
        return norm(hidden)  # type: ignore[no-any-return]

    def sum_over_ranks(self, partial: Tensor) -> Tensor:
        """Sum partial results in place over the tensor-parallel ranks."""
        if self.tp > 1:
            dist.all_reduce(partial, group=self.model.tp_group)
        return partial


class _Linear:
    """A linear of a layer in a decode step, with the adapters beside its weight."""

    def __init__(self, module: Any, decoder: Decoder, is_row: bool) -> None:
        """View the weight, and join the adapters; `is_row`: ranks have parts of the inputs."""
        self.weight = module.weight
        self.bias = module.bias
        self.is_row = is_row
        self.sum_over_ranks = decoder.sum_over_ranks
        adapters = getattr(module, ADAPTERS, None)
        self.is_adapted = adapters is not None
        if adapters is not None:
            self.a, self.b = adapters.joined()
            self.scale = adapters.lora.scale

    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute W x + scale * B A x: [rows, in on this rank] -> [rows, out]."""
        result = linear(hidden, self.weight, self.bias)
        if self.is_row:
            result = self.sum_over_ranks(result)
        if not self.is_adapted:
            return result
        inner = linear(hidden, self.a)
        if self.is_row:
            inner = self.sum_over_ranks(inner)
        return result + linear(inner * self.scale, self.b)


class _Layer:
    """One decoder layer in a decode step."""

    def __init__(self, layer: Any, decoder: Decoder) -> None:
        attention = layer.self_attention
        config = layer.config
        self.sum_over_ranks = decoder.sum_over_ranks
        self.head_dim = decoder.head_dim
        self.attention_norm = layer.input_layernorm
        self.mlp_norm = layer.pre_mlp_layernorm
        self.attention = attention
        self.query_norm = attention.q_layernorm
        self.key_norm = attention.k_layernorm
        self.qkv = _Linear(attention.linear_qkv, decoder, is_row=False)
        self.out = _Linear(attention.linear_proj, decoder, is_row=True)
        self.groups = config.num_query_groups // decoder.tp  # 0 where ranks share one
        self.mlp = layer.mlp
        self.is_plain = config.num_moe_experts is None and not device.fuses_layers()
        if self.is_plain:
            self.widen = _Linear(layer.mlp.linear_fc1, decoder, is_row=False)
            self.narrow = _Linear(layer.mlp.linear_fc2, decoder, is_row=True)
        has_all_experts = not (self.is_plain or isinstance(layer.mlp, SharedExperts))
        grouped = has_all_experts and not device.fuses_layers()
        self.weights = ExpertWeights.of(layer.mlp.experts.local_experts) if grouped else None

    def forward(
        self, hidden: Tensor, number: int, cos: Tensor, sin: Tensor, attend: Attend
    ) -> Tensor:
        """Compute the layer: [rows, hidden] -> [rows, hidden].

        Args:
            hidden: [rows, hidden].
            number: layer number from 1.
            cos: [rows, 1, 1, d] rotary factors.
            sin: the same; its first half is negated.
            attend: see `Decoder`.
        """
        rotated, value = self._projections(self.attention_norm(hidden))
        half = self.head_dim // 2
        rotated = rotated * cos + rotated.roll(half, -1) * sin
        query = rotated[:, :, :-1]
        key = rotated[:, :, -1]
        attended = attend.attend(number, query, key, value).reshape(len(hidden), -1)
        hidden = hidden + self.out(attended)
        return hidden + self._mlp(self.mlp_norm(hidden))

    def _projections(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Project to queries and keys [rows, groups, heads per group + 1, d], and to values.

        A group's key is behind its queries. Values: [rows, groups, d].
        """
        if not self.groups:
            query, key, value = self.attention.get_query_key_value_tensors(hidden[:, None])
            return torch.cat((query, key), 2), value[:, 0]  # the second axis is the one group
        heads = self.qkv(hidden)
        heads = heads.view(len(hidden), self.groups, -1, self.head_dim)
        value = heads[:, :, -1]
        if self.query_norm is None:
            return heads[:, :, :-1], value
        query = self.query_norm(heads[:, :, :-2])
        key = self.key_norm(heads[:, :, -2:-1])
        return torch.cat((query, key), 2), value

    def _mlp(self, hidden: Tensor) -> Tensor:
        if self.weights is not None:
            return self.sum_over_ranks(routed_experts(hidden, self.mlp.router, self.weights))
        if not self.is_plain:
            return self.mlp(hidden[:, None])[0].squeeze(1)  # type: ignore[no-any-return]
        gate, up = self.widen(hidden).chunk(2, dim=-1)
        return self.narrow(F.silu(gate) * up)
