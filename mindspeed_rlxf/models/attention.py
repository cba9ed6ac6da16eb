"""Attention for packed sequences (our own on CPU and CUDA, Megatron's on NPU), rotary angles.

Megatron passes query, key and value as [tokens, batch, heads, head_dim], or packed as [tokens,
heads, head_dim], after the rotary embedding. Rows of equal length come without
`packed_seq_params`; for packed sequences and for generation it is an `Attend`, whose method
`attend` computes the attention.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.device import kernels

# Padding all sequences of a pack to the longest costs compute but saves calls: it pays while the
# attention area stays under this multiple of the exact one.
MAX_PADDED_AREA = 2.0
MAX_FUSED_SEQUENCES = 1024  # most sequences in one call of the NPU's fused attention

# causal attention of packed sequences: (query, key, value, lengths) -> [tokens, heads, d]
PackedKernel = Callable[[Tensor, Tensor, Tensor, tuple[int, ...]], Tensor]


class CoreAttention(MegatronModule):
    """Causal scaled-dot-product attention; takes the place of Megatron's DotProductAttention."""

    packed_kernel: PackedKernel | None = None  # the device's fused operator for this model, if any

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any = None,
        attention_type: str = "self",
        softmax_scale: float | None = None,
        **_unused_by_this_attention: Any,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.softmax_scale = softmax_scale
        half = config.params_dtype in (torch.bfloat16, torch.float16)  # what such kernels take
        tp = config.tensor_model_parallel_size
        groups = max(config.num_query_groups // tp, 1)  # ranks may share one
        shape = config.num_attention_heads // tp, groups, config.kv_channels  # on this rank
        self.packed_kernel = kernels.find(kernels.Operator.ATTENTION, *shape) if half else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend causally, or as `packed_seq_params` says if it is an `Attend`.

        query:      [s, b, heads, d]; with an `Attend` [tokens, heads, d]
        key, value: [s, b, groups, d]; with an `Attend` [tokens, groups, d]
        Returns [s, b, heads * d]; with an `Attend` [tokens, heads * d], to which Megatron adds the
        axis b. Raises AssertionError for a mask or a bias; ignores `attn_mask_type`.
        """
        assert attention_mask is None and attention_bias is None, "the mask is causal, nothing else"
        if isinstance(packed_seq_params, Attend):
            assert query.dim() == 3, "Megatron drops the batch axis of packed tokens"
            attended = packed_seq_params.attend(
                self.layer_number, query, key, value, self.packed_kernel
            )
            return attended.flatten(1)
        out = causal_attention(*(x.permute(1, 2, 0, 3) for x in (query, key, value)))
        return out.permute(2, 0, 1, 3).reshape(query.size(0), query.size(1), -1)


class FusedAttention(DotProductAttention):
    """Megatron's core attention, whose computation MindSpeed replaces by the NPU's fused operator.

    The operator is causal here. It takes query groups without repeating keys, and both padded rows
    ("SBH") and packed sequences ("TND").
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend as `CoreAttention.forward`, by the fused operator; an `Attend` may use another."""
        assert attention_mask is None and attention_bias is None, "the mask is causal, nothing else"
        if isinstance(packed_seq_params, Attend):
            attended = packed_seq_params.attend(
                self.layer_number, query, key, value, self._attend_packed
            )
            return attended.flatten(1)
        return super().forward(query, key, value, None, self.attn_mask_type)

    def _attend_packed(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...]
    ) -> Tensor:
        step = MAX_FUSED_SEQUENCES
        packs = [lengths[i : i + step] for i in range(0, len(lengths), step)]
        tokens = [sum(pack) for pack in packs]
        parts = zip(*(x.split(tokens) for x in (query, key, value)), packs, strict=True)
        outs = [self._attend_pack(*part) for part in parts]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _attend_pack(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...]
    ) -> Tensor:
        ends = list(accumulate(lengths))  # as the operator wants them: a list without a leading 0
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
        return super().forward(
            query, key, value, None, self.attn_mask_type, packed_seq_params=packed
        )


@dataclass
class Attend(PackedSeqParams):
    """Base class: computes which tokens of a forward pass attend to which, through Megatron.

    `qkv_format` is "thd" and no cumulative lengths are given: Megatron then drops the batch axis of
    1, applies the rotary angles to tokens in the given order, and passes this object to the core
    attention unchanged. (Versions under 0.16 drop that axis whatever the format says.)
    """

    qkv_format: str = "thd"

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        fused: PackedKernel | None = None,
    ) -> Tensor:
        """Attend: query [tokens, heads, d]; key, value [tokens, groups, d] -> [tokens, heads, d].

        Subclasses implement it; this one raises NotImplementedError.

        layer: number of the layer, from 1; counted in the stage, or in the whole model by newer
               versions of Megatron
        fused: the device's operator for causal attention of packed sequences; None = it has none
        """
        raise NotImplementedError(f"{type(self).__name__} must say how its tokens attend")


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend causally: query [b, heads, s, d]; key, value [b, groups, s, d] -> [b, heads, s, d]."""
    gqa = query.size(1) != key.size(1)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=gqa)


@dataclass
class PackedSequences(Attend):
    """Sequences laid end to end; each token attends to its own sequence up to itself.

    lengths: tokens of each sequence, at least one
    """

    lengths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.lengths and min(self.lengths) > 0, "a pack needs sequences of positive length"
        area = len(self.lengths) * max(self.lengths) ** 2
        exact = sum(n * n for n in self.lengths)
        self._padded = len(self.lengths) > 1 and area <= MAX_PADDED_AREA * exact
        self._index: tuple[Tensor, Tensor] | None = None

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        fused: PackedKernel | None = None,
    ) -> Tensor:
        """Attend causally within each sequence: by `fused`, or else by torch's operator.

        Torch's is called once for all sequences, padded to the longest, if that computes little
        more than needed (MAX_PADDED_AREA); else once for each sequence.
        """
        if fused is not None:
            return fused(query, key, value, self.lengths)
        if self._padded:
            gather, scatter = self._padding_index(query.device)
            shape = len(self.lengths), max(self.lengths)
            padded = (
                x.index_select(0, gather).view(*shape, *x.shape[1:]).transpose(1, 2)
                for x in (query, key, value)
            )
            out = causal_attention(*padded)
            return out.transpose(1, 2).flatten(0, 1).index_select(0, scatter)
        outs = [
            causal_attention(*(x.transpose(0, 1).unsqueeze(0) for x in parts))
            for parts in zip(*(x.split(self.lengths) for x in (query, key, value)), strict=True)
        ]
        return torch.cat([out.squeeze(0).transpose(0, 1) for out in outs])

    def _padding_index(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the indices that pad packed tokens, and those that pack padded tokens.

        First the token of each padded position [sequences * longest]; after a sequence's end its
        last token. Then the padded position of each token [tokens]. Computed in the first call;
        later ones return the same tensors, whatever their `device`.
        """
        if self._index is None:
            lengths = torch.tensor(self.lengths)
            starts = lengths.cumsum(0) - lengths
            columns = torch.arange(max(self.lengths))
            gather = starts[:, None] + torch.minimum(columns[None, :], lengths[:, None] - 1)
            valid = columns[None, :] < lengths[:, None]
            scatter = valid.flatten().nonzero().squeeze(1)
            self._index = (gather.flatten().to(device), scatter.to(device))
        return self._index


def inverse_frequencies(architecture: ArchitectureConfig) -> Tensor:
    """Return the angle per position of each pair of a head's elements, scaled if configured.

    Returns [head_dim / 2] fp32 on the CPU.
    """
    a = architecture
    exponents = torch.arange(0, a.head_dim, 2, dtype=torch.int64).float() / a.head_dim
    inverse = 1.0 / (a.rotary_base**exponents)
    if a.rope_scaling_type == "linear":
        return inverse / a.rope_scaling_factor
    if a.rope_scaling_type == "llama3":
        return _llama3(inverse, a)
    return inverse


def _llama3(inverse: Tensor, a: ArchitectureConfig) -> Tensor:
    """Return frequencies scaled as in Llama 3, [head_dim / 2]."""
    assert a.original_max_position_embeddings, "llama3 scaling needs the original length"
    original = a.original_max_position_embeddings
    wavelength = 2 * math.pi / inverse
    low, high = original / a.low_freq_factor, original / a.high_freq_factor
    blend = (original / wavelength - a.low_freq_factor) / (a.high_freq_factor - a.low_freq_factor)
    blended = (1 - blend) * inverse / a.rope_scaling_factor + blend * inverse
    scaled = torch.where(wavelength > low, inverse / a.rope_scaling_factor, inverse)
    between = (wavelength <= low) & (wavelength >= high)
    return torch.where(between, blended, scaled)


def rotary_angles(positions: Tensor, inverse: Tensor) -> Tensor:
    """Return position * frequency in Megatron's form, [tokens, 1, 1, head_dim] fp32.

    The frequencies stand twice, for both halves of a head.

    positions: [tokens] int64
    inverse:   frequencies [head_dim / 2]
    """
    angles = positions.to(torch.float32)[:, None] * inverse[None, :]
    return torch.cat((angles, angles), dim=-1)[:, None, None, :]
