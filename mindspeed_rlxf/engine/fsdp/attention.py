"""Attention of packed rows for the models of transformers, also with context parallelism.

A model calls `attend` in every layer through transformers' `AttentionInterface`. It never reads the
model's mask: each sequence attends to itself, causally and within the layer's window. With
context parallelism ranks exchange tokens for heads (`models.context_parallel`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mindspeed_rlxf.device.kernels import assert_close, noise, sequence_ends
from mindspeed_rlxf.models.context_parallel import exchange_for_heads, exchange_for_tokens

logger = logging.getLogger(__name__)

NAME = "rlxf_rows"  # in transformers' registry of attention functions
FLASH = "flash_attention_2"


@dataclass(frozen=True)
class Layout:
    """The sequences of a micro-batch, passed to every layer.

    Attributes:
        lengths: Of the sequences packed in one row, in order; None = padded rows.
        group: Ranks that share the tokens; None = this rank has all tokens.
        flash: Whether the flash attention of the device, or torch's for packed sequences, computes
            what it can.
        windows: Gets the window of every call; None = without one.
    """

    lengths: tuple[int, ...] | None
    group: dist.ProcessGroup | None = None
    flash: bool = False
    windows: set[int | None] = field(default_factory=set, compare=False)


def register() -> None:
    """Make `attend` known to transformers."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS[NAME] = attend


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    layout: Layout | None = None,
    **kinds: Any,
) -> tuple[Tensor, None]:
    """Attend within each sequence of `layout`; see transformers' attention functions.

    Shapes: query [rows, heads, tokens, d], key and value [rows, key-value heads, tokens, d], the
    result [rows, tokens, heads, d]. `kinds` are the layer's sliding_window, softcap and s_aux.
    """
    assert layout is not None, "its layers do not get the sequences, try recompute=none"
    group = layout.group
    layout.windows.add(kinds.get("sliding_window"))
    if group is not None:
        query, key, value = exchange_for_heads(query, key, value, group, tokens=2, heads=1)
        heads = query.size(1)
        module = _with_heads(module, heads, group.rank(), heads // key.size(1))
        if kinds.get("s_aux") is not None:
            kinds["s_aux"] = kinds["s_aux"].chunk(group.size())[group.rank()]
    if layout.flash and _flash_computes(query, key, value, layout, kinds):
        out = _attend_flash(query, key, value, scaling, layout, kinds)
    elif layout.flash and _varlen_computes(query, key, value, layout, kinds):
        out = _attend_varlen(query, key, value, scaling, layout, kinds)
    else:
        lengths = layout.lengths or (query.size(2),)
        outputs = []
        for q, k, v in _split_sequences(query, key, value, lengths):
            outputs.append(_attend_one(module, q, k, v, scaling, kinds))
        out = torch.cat(outputs, dim=1)
    if group is not None:
        out = exchange_for_tokens(out, group, tokens=1, heads=2)
    return out, None


def _split_sequences(
    query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield query, key and value of each packed sequence."""
    yield from zip(
        query.split(lengths, dim=2),
        key.split(lengths, dim=2),
        value.split(lengths, dim=2),
        strict=True,
    )


def _attend_one(
    module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, kinds: Any
) -> Tensor:
    """Attend in one sequence, or in padded rows; return [rows, tokens, heads, d]."""
    tokens = query.size(2)
    window = kinds.get("sliding_window")
    is_limited = window is not None and window < tokens
    if kinds.get("softcap") is None and kinds.get("s_aux") is None and not is_limited:
        grouped = query.size(1) != key.size(1)
        attended = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped
        )
        return attended.transpose(1, 2)
    positions = torch.arange(tokens, device=query.device)
    distance = positions[:, None] - positions
    is_hidden = distance < 0
    if is_limited:
        is_hidden |= distance >= window
    mask = torch.zeros(tokens, tokens, dtype=query.dtype, device=query.device)
    mask = mask.masked_fill(is_hidden, torch.finfo(query.dtype).min)[None, None]
    # What the family adds to attention (caps, sinks) is in its own plain implementation.
    module_class = getattr(module, "owner", type(module))
    eager = vars(sys.modules[module_class.__module__])["eager_attention_forward"]
    outputs: Tensor = eager(module, query, key, value, mask, scaling=scaling, dropout=0.0, **kinds)[
        0
    ]
    return outputs


def _flash_computes(query: Tensor, key: Tensor, value: Tensor, layout: Layout, kinds: Any) -> bool:
    """Return whether the device's operator has what the layer needs; NPUs' has no window or cap."""
    needed = {name for name in ("softcap", "s_aux") if kinds.get(name) is not None}
    longest = max(layout.lengths or (query.size(2),))
    if (kinds.get("sliding_window") or longest) < longest:
        needed.add("window_size")
    parameters = try_flash(query.device, query.size(1), key.size(1), query.size(-1), value.size(-1))
    return parameters is not None and needed <= parameters


@cache
def try_flash(
    target: torch.device, heads: int, groups: int, key_size: int, value_size: int
) -> frozenset[str] | None:
    """Run the device's flash attention on two sequences, forward and backward.

    Args:
        target: The device.
        heads: Of queries, on this rank.
        groups: Heads of keys and values.
        key_size: Of a head's queries and keys.
        value_size: Of a head's values.

    Returns:
        Names of the operator's parameters, among them what it can compute. None if it does not
        work here, or disagrees with torch; a log line then says why.
    """
    lengths = 5, 19
    query = noise(target, 1, heads, sum(lengths), key_size)
    key = noise(target, 1, groups, sum(lengths), key_size)
    value = noise(target, 1, groups, sum(lengths), value_size)
    positions = torch.cat([torch.arange(length, device=target) for length in lengths])
    kinds = {"position_ids": positions[None]}
    try:
        with torch.enable_grad():
            flash = _attend_flash(query, key, value, None, Layout(lengths), kinds)
            expected = []
            for q, k, v in _split_sequences(query, key, value, lengths):
                expected.append(_attend_one(None, q, k, v, None, {}))
            assert_close(flash, torch.cat(expected, dim=1), (query, key, value))
        return frozenset(signature(_flash_operator()).parameters)
    except Exception as error:  # whatever a library of the device raises
        reason = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
        logger.info("flash attention does not work here (%s), torch's is used", reason)
        return None


def _flash_operator() -> Any:
    """Return the operator for packed sequences behind `flash_attention_2` of transformers."""
    from transformers import modeling_flash_attention_utils as utils

    if hasattr(utils, "lazy_import_flash_attention"):
        return utils.lazy_import_flash_attention(FLASH)[0][1]
    return utils.flash_attn_varlen_func  # transformers 4


def _attend_flash(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, layout: Layout, kinds: Any
) -> Tensor:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    packing: dict[str, Any] = {}
    if layout.lengths is not None:
        ends = sequence_ends(layout.lengths, query.device)
        longest = max(layout.lengths)
        packing = {
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
            "max_length_q": longest,
            "max_length_k": longest,
        }
    flash_attention = ALL_ATTENTION_FUNCTIONS[FLASH]
    # Operators want values as wide as keys; transformers 4 pads DeepSeek's by the name of FLASH.
    value_size = value.size(-1)
    value = F.pad(value, (0, query.size(-1) - value_size))
    # What it reads of a layer, whose configuration names our own function.
    config = SimpleNamespace(_attn_implementation=FLASH)
    module = SimpleNamespace(config=config, is_causal=True, layer_idx=None)
    attended: Tensor = flash_attention(
        module, query, key, value, None, scaling=scaling, dropout=0.0, **kinds, **packing
    )[0]
    return attended[..., :value_size]


def _varlen_computes(query: Tensor, key: Tensor, value: Tensor, layout: Layout, kinds: Any) -> bool:
    """Return whether torch's attention of packed sequences has what the layer needs, and works."""
    needs_more = kinds.get("softcap") is not None or kinds.get("s_aux") is not None
    if layout.lengths is None or needs_more or torch.are_deterministic_algorithms_enabled():
        return False
    return try_varlen(query.device, query.size(1), key.size(1), query.size(-1), value.size(-1))


@cache
def try_varlen(
    target: torch.device, heads: int, groups: int, key_size: int, value_size: int
) -> bool:
    """Run torch's attention of packed sequences, with and without a window, as `try_flash` does.

    Returns:
        Whether it works here and agrees with plain torch; if not, a log line says why.
    """
    lengths = 5, 19
    query = noise(target, 1, heads, sum(lengths), key_size)
    key = noise(target, 1, groups, sum(lengths), key_size)
    value = noise(target, 1, groups, sum(lengths), value_size)
    try:
        with torch.enable_grad():
            for window in (None, 4):
                kinds = {"sliding_window": window}
                packed = _attend_varlen(query, key, value, None, Layout(lengths), kinds)
                expected = []
                for q, k, v in _split_sequences(query, key, value, lengths):
                    positions = torch.arange(q.size(2), device=target)
                    distance = positions[:, None] - positions
                    seen = (distance >= 0) & (distance < (window or q.size(2)))
                    attended = F.scaled_dot_product_attention(
                        q, k, v, attn_mask=seen, enable_gqa=True
                    )
                    expected.append(attended.transpose(1, 2))
                assert_close(packed, torch.cat(expected, dim=1), (query, key, value))
        return True
    except Exception as error:  # whatever a library of the device raises
        reason = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
        logger.info("torch.nn.attention.varlen does not work here (%s)", reason)
        return False


def _attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, layout: Layout, kinds: Any
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    assert layout.lengths is not None, "padded rows are not packed"
    ends = sequence_ends(layout.lengths, query.device)
    longest = max(layout.lengths)
    window = kinds.get("sliding_window")
    num_before = -1 if window is None else window - 1  # tokens that one sees beside itself
    packed = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    operator: Any = varlen_attn  # its arguments differ between versions
    attended: Tensor = operator(
        *packed,
        ends,
        ends,
        longest,
        longest,
        scale=scaling,
        window_size=(num_before, 0),
        enable_gqa=query.size(1) != key.size(1),
    )
    return attended[None]


def _with_heads(module: Any, heads: int, rank: int, groups: int) -> Any:
    """Return what attention functions read of a layer, with this rank's heads alone."""
    layer = SimpleNamespace(owner=type(module), training=module.training)
    layer.num_key_value_groups = groups
    layer.head_dim = getattr(module, "head_dim", None)
    if hasattr(module, "sinks"):
        layer.sinks = module.sinks[rank * heads : (rank + 1) * heads]
    return layer
