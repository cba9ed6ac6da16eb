"""Attention for packed sequences (ours on CPU and CUDA, Megatron's on NPU), and rotary angles.

Megatron passes query, key and value after the rotary embedding, as [tokens, batch, heads, head_dim]
or packed as [tokens, heads, head_dim]. Equally long rows come without `packed_seq_params`; for
packed sequences and generation it is an `Attend`, whose `attend` computes the attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, chain, groupby
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.device import kernels
from mindspeed_rlxf.device.copies import upload
from mindspeed_rlxf.models.context_parallel import exchange_for_heads, exchange_for_tokens

# Padding all sequences of a pack to the longest costs compute but saves calls: it pays while the
# attention area stays under this multiple of the exact one.
MAX_PADDED_AREA = 2.0
MAX_FUSED_SEQUENCES = 1024  # most sequences in one call of the NPU's fused attention

# Attention of packed sequences: (query, key, value, lengths of queries, lengths of keys) ->
# [tokens, heads, d]. Query i of n attends to all keys of its sequence but the last n - 1 - i.
PackedKernel = Callable[[Tensor, Tensor, Tensor, tuple[int, ...], tuple[int, ...]], Tensor]


class CoreAttention(MegatronModule):
    """Causal scaled-dot-product attention; replaces Megatron's DotProductAttention."""

    packed_kernel: PackedKernel | None = None  # the device's fused operator for this model, if any
    shared_kernel: PackedKernel | None = None  # the same for `SharedPrompts`

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
        if config.params_dtype in (torch.bfloat16, torch.float16):  # what such kernels take
            self.packed_kernel = kernels.find(kernels.Operator.ATTENTION, *rank_heads(config))
            self.shared_kernel = kernels.find(kernels.Operator.SHARED_PROMPTS, *rank_heads(config))

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

        query is [s, b, heads, d], key and value [s, b, groups, d], the result [s, b, heads * d].
        With an `Attend` they are [tokens, heads, d], [tokens, groups, d] and [tokens, heads * d],
        to which Megatron adds the batch axis. Ignores `attn_mask_type`; asserts no mask or bias.
        """
        assert attention_mask is None and attention_bias is None, "the mask is causal, nothing else"
        if isinstance(packed_seq_params, Attend):
            assert query.dim() == 3, "Megatron drops the batch axis of packed tokens"
            shared = packed_seq_params.shares_prompts
            kernel = self.shared_kernel if shared else self.packed_kernel
            attended = packed_seq_params.attend(self.layer_number, query, key, value, kernel)
            return attended.flatten(1)
        out = causal_attention(*(x.permute(1, 2, 0, 3) for x in (query, key, value)))
        return out.permute(2, 0, 1, 3).reshape(query.size(0), query.size(1), -1)


class FusedAttention(DotProductAttention):
    """Megatron's core attention; MindSpeed replaces its computation by the NPU's fused operator.

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
        """Like `CoreAttention.forward`, by the fused operator; an `Attend` may use another."""
        assert attention_mask is None and attention_bias is None, "the mask is causal, nothing else"
        if isinstance(packed_seq_params, Attend):
            attended = packed_seq_params.attend(
                self.layer_number, query, key, value, self._attend_packed
            )
            return attended.flatten(1)
        return super().forward(query, key, value, None, self.attn_mask_type)

    def _attend_packed(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: tuple[int, ...],
        key_lengths: tuple[int, ...],
    ) -> Tensor:
        """Attend to all sequences, in calls of MAX_FUSED_SEQUENCES."""
        outs = []
        query_start = 0
        key_start = 0
        for start in range(0, len(lengths), MAX_FUSED_SEQUENCES):
            pack_lengths = lengths[start : start + MAX_FUSED_SEQUENCES]
            pack_key_lengths = key_lengths[start : start + MAX_FUSED_SEQUENCES]
            query_stop = query_start + sum(pack_lengths)
            key_stop = key_start + sum(pack_key_lengths)
            out = self._attend_pack(
                query[query_start:query_stop],
                key[key_start:key_stop],
                value[key_start:key_stop],
                pack_lengths,
                pack_key_lengths,
            )
            outs.append(out)
            query_start = query_stop
            key_start = key_stop
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _attend_pack(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: tuple[int, ...],
        key_lengths: tuple[int, ...],
    ) -> Tensor:
        if lengths != key_lengths:  # MindSpeed's replacement takes one list of ends for both
            kernel = kernels.find(kernels.Operator.SHARED_PROMPTS, *rank_heads(self.config))
            attended: Tensor = kernel(query, key, value, lengths, key_lengths)
            return attended
        ends = list(accumulate(lengths))  # as the operator wants them: a list without a leading 0
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
        return super().forward(
            query, key, value, None, self.attn_mask_type, packed_seq_params=packed
        )


def rank_heads(config: Any) -> tuple[int, int, int]:
    """Return this rank's head count and query groups inside attention, and the head width."""
    # The context-parallel ranks divide the heads there; Megatron's configuration does not say so.
    cp = parallel_state.get_context_parallel_world_size() or 1  # 0 without process groups
    ranks = config.tensor_model_parallel_size * cp
    groups = max(config.num_query_groups // ranks, 1)  # ranks may share one
    return config.num_attention_heads // ranks, groups, config.kv_channels


def shares_prompts(layer: CoreAttention | FusedAttention) -> bool:
    """Return whether responses can share one prompt copy on this device.

    False if the layer's fused operator for packed sequences has no counterpart for this.
    """
    if isinstance(layer, CoreAttention):
        return layer.packed_kernel is None or layer.shared_kernel is not None
    shape = rank_heads(layer.config)
    return kernels.find(kernels.Operator.SHARED_PROMPTS, *shape) is not None


@dataclass
class Attend(PackedSeqParams):
    """Base class: decides which tokens in a forward pass attend to which, through Megatron.

    `qkv_format` is "thd" without cumulative lengths: Megatron then drops the batch axis (size 1),
    applies rotary angles in the given token order, and passes this object to the core attention
    unchanged. (Versions under 0.16 drop that axis for any format.)
    """

    qkv_format: str = "thd"

    @property
    def shares_prompts(self) -> bool:
        """Whether some sequences also attend to another one, their prompt."""
        return False

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        fused: PackedKernel | None = None,
    ) -> Tensor:
        """Attend; implemented by subclasses.

        Args:
            layer: layer number from 1, within the stage, or within the model in newer Megatron.
            query: [tokens, heads, d].
            key: [tokens, groups, d].
            value: [tokens, groups, d].
            fused: the device's operator for causal packed attention, if any.

        Returns:
            [tokens, heads, d].
        """
        raise NotImplementedError(f"{type(self).__name__} must say how its tokens attend")


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend causally: query [b, heads, s, d]; key, value [b, groups, s, d]."""
    gqa = query.size(1) != key.size(1)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=gqa)


@dataclass
class PackedSequences(Attend):
    """Non-empty sequences laid end to end; each token attends to its own up to itself."""

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

        Torch's is called once for all sequences, padded to the longest, if the waste is small
        (MAX_PADDED_AREA); else once per sequence.
        """
        if fused is not None:
            return fused(query, key, value, self.lengths, self.lengths)
        if self._padded:
            gather, scatter = self._padding_index(query.device)

            gather = gather.view(len(self.lengths), max(self.lengths))
            out = causal_attention(
                _select_padded(query, gather),
                _select_padded(key, gather),
                _select_padded(value, gather),
            )
            return out.transpose(1, 2).flatten(0, 1).index_select(0, scatter)
        outs = []
        for q, k, v in zip(
            query.split(self.lengths),
            key.split(self.lengths),
            value.split(self.lengths),
            strict=True,
        ):
            out = causal_attention(
                q.transpose(0, 1).unsqueeze(0),
                k.transpose(0, 1).unsqueeze(0),
                v.transpose(0, 1).unsqueeze(0),
            )
            outs.append(out.squeeze(0).transpose(0, 1))
        return torch.cat(outs)

    def _padding_index(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the indices to pad packed tokens, and to pack padded ones.

        First the token per padded position [sequences * longest]; behind a sequence its last token.
        Then the padded position per token [tokens]. Computed once; later calls ignore `device`.
        """
        if self._index is None:
            lengths = torch.tensor(self.lengths)
            starts = lengths.cumsum(0) - lengths
            columns = torch.arange(max(self.lengths))
            gather = starts[:, None] + torch.minimum(columns[None, :], lengths[:, None] - 1)
            valid = columns[None, :] < lengths[:, None]
            scatter = valid.flatten().nonzero().squeeze(1)
            self._index = (upload(gather.flatten(), device), upload(scatter, device))
        return self._index


@dataclass
class SharedPrompts(Attend):
    """Packed sequences, including responses that also attend to their whole prompt.

    Responses to one prompt are neighbours, somewhere behind the prompt's own sequence.
    """

    lengths: tuple[int, ...] = ()  # tokens per sequence, at least one
    prompts: tuple[int | None, ...] = ()  # per response its prompt's sequence number, else None

    @property
    def shares_prompts(self) -> bool:
        """See `Attend`."""
        return True

    def __post_init__(self) -> None:
        self.starts = tuple(accumulate(self.lengths, initial=0))[:-1]
        key_lengths = []
        for length, prompt in zip(self.lengths, self.prompts, strict=True):
            key_lengths.append(length if prompt is None else self.lengths[prompt] + length)
        self.key_lengths = tuple(key_lengths)
        self._keys: Tensor | None = None
        self._plan: _Plan | None = None

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        fused: PackedKernel | None = None,
    ) -> Tensor:
        """Attend by `fused`, or else by torch's operator, once per prompt."""
        if fused is not None:
            if self._keys is None:
                numbers = range(len(self.lengths))
                keys = torch.cat([self._keys_of(i) for i in numbers])
                self._keys = upload(keys, query.device)
            keys = key.index_select(0, self._keys)
            values = value.index_select(0, self._keys)
            return fused(query, keys, values, self.lengths, self.key_lengths)
        if self._plan is None:
            self._plan = self._make_plan(query.device)
        independent, tokens, calls, order = self._plan
        out = independent.attend(
            layer,
            query.index_select(0, tokens),
            key.index_select(0, tokens),
            value.index_select(0, tokens),
        )
        outs = [out, *(responses.attend(query, key, value) for responses in calls)]
        return torch.cat(outs).index_select(0, order)

    def _tokens_of(self, number: int) -> Tensor:
        return torch.arange(self.starts[number], self.starts[number] + self.lengths[number])

    def _keys_of(self, number: int) -> Tensor:
        tokens = self._tokens_of(number)
        prompt = self.prompts[number]
        return tokens if prompt is None else torch.cat((self._tokens_of(prompt), tokens))

    def _make_plan(self, target: torch.device) -> _Plan:
        independent = [i for i, prompt in enumerate(self.prompts) if prompt is None]
        responses = [i for i, prompt in enumerate(self.prompts) if prompt is not None]
        calls: list[list[int]] = []  # the responses of one call: all of a prompt, or one
        for prompt, group in groupby(responses, key=self.prompts.__getitem__):
            numbers = list(group)
            prompt_length = self.lengths[prompt or 0]
            longest = max(self.lengths[i] for i in numbers)
            padded_area = len(numbers) * longest * (prompt_length + longest)
            exact_area = sum(self.lengths[i] * self.key_lengths[i] for i in numbers)
            if padded_area <= MAX_PADDED_AREA * exact_area:
                calls.append(numbers)
            else:
                calls += [[i] for i in numbers]
        in_order = list(chain(independent, *calls))
        order = torch.cat([self._tokens_of(i) for i in in_order])
        return (
            PackedSequences(lengths=tuple(self.lengths[i] for i in independent)),
            upload(torch.cat([self._tokens_of(i) for i in independent]), target),
            [self._responses(numbers, target) for numbers in calls],
            upload(order.argsort(), target),
        )

    def _responses(self, numbers: list[int], target: torch.device) -> _Responses:
        """Pad one prompt's responses; no query sees a padded key."""
        queries = pad_sequence([self._tokens_of(i) for i in numbers], batch_first=True)
        keys = pad_sequence([self._keys_of(i) for i in numbers], batch_first=True)
        width = queries.size(1)
        lengths = torch.tensor([self.lengths[i] for i in numbers])
        results = (torch.arange(width) < lengths[:, None]).flatten().nonzero().squeeze(1)
        mask = torch.ones(width, keys.size(1), dtype=torch.bool).tril(keys.size(1) - width)
        return _Responses(*(upload(index, target) for index in (queries, keys, results, mask)))


@dataclass
class AcrossRanks(Attend):
    """Attention of a pack whose tokens are divided among the ranks of a group."""

    whole: Attend = None  # type: ignore[assignment]  # attention of the complete pack
    group: dist.ProcessGroup = None  # type: ignore[assignment]

    @property
    def shares_prompts(self) -> bool:
        """See `Attend`."""
        return self.whole.shares_prompts

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        fused: PackedKernel | None = None,
    ) -> Tensor:
        """Exchange tokens for heads, attend, and exchange back; a collective over the group."""
        # Without names, so that in a pass without gradients they are freed before the way back.
        attended = self.whole.attend(
            layer, *exchange_for_heads(query, key, value, self.group, tokens=0, heads=1), fused
        )
        return exchange_for_tokens(attended, self.group, tokens=0, heads=1)


class _Responses(NamedTuple):
    """One prompt's responses, padded to the longest."""

    queries: Tensor  # [responses, longest] index per padded query
    keys: Tensor  # [responses, prompt + longest]
    results: Tensor  # [tokens] each token's index among the padded results
    mask: Tensor  # [longest, prompt + longest] bool, True = the query attends to the key

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q = _select_padded(query, self.queries)
        k = _select_padded(key, self.keys)
        v = _select_padded(value, self.keys)
        gqa = query.size(1) != key.size(1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, enable_gqa=gqa)
        return out.transpose(1, 2).flatten(0, 1).index_select(0, self.results)


def _select_padded(packed: Tensor, index: Tensor) -> Tensor:
    """Select tokens by [sequences, longest] indices; return [sequences, heads, longest, d]."""
    selected = packed.index_select(0, index.flatten())
    return selected.view(*index.shape, *packed.shape[1:]).transpose(1, 2)


# Sequences without a prompt and their tokens, calls for responses, and where each token of the pack
# is in all results end to end. The same for all layers.
_Plan: TypeAlias = tuple[PackedSequences, Tensor, list[_Responses], Tensor]


def inverse_frequencies(architecture: ArchitectureConfig) -> Tensor:
    """Return the angle per position, [head_dim / 2] fp32 on CPU, scaled if configured."""
    a = architecture
    exponents = torch.arange(0, a.head_dim, 2, dtype=torch.int64).float() / a.head_dim
    inverse = 1.0 / (a.rotary_base**exponents)
    if a.rope_scaling_type == "linear":
        return inverse / a.rope_scaling_factor
    if a.rope_scaling_type == "llama3":
        return _llama3(inverse, a)
    return inverse


def _llama3(inverse: Tensor, a: ArchitectureConfig) -> Tensor:
    """Scale frequencies as Llama 3 does, [head_dim / 2]."""
    assert a.original_max_position_embeddings, "llama3 scaling needs the original length"
    original = a.original_max_position_embeddings
    wavelength = 2 * math.pi / inverse
    low = original / a.low_freq_factor
    high = original / a.high_freq_factor
    blend = (original / wavelength - a.low_freq_factor) / (a.high_freq_factor - a.low_freq_factor)
    blended = (1 - blend) * inverse / a.rope_scaling_factor + blend * inverse
    scaled = torch.where(wavelength > low, inverse / a.rope_scaling_factor, inverse)
    between = (wavelength <= low) & (wavelength >= high)
    return torch.where(between, blended, scaled)


def rotary_angles(positions: Tensor, inverse: Tensor) -> Tensor:
    """Return position * frequency in Megatron's form, [tokens, 1, 1, head_dim] fp32.

    Frequencies appear twice, once per half head. `positions` are [tokens] int64, `inverse` are the
    frequencies [head_dim / 2].
    """
    angles = positions.to(torch.float32)[:, None] * inverse[None, :]
    return torch.cat((angles, angles), dim=-1)[:, None, None, :]
