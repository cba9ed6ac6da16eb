"""Rules of the device, as data: what it refuses, where that is written, and of which version.

A rule without a source is not one. The (operator, dtype) pairs are those that runs of this project
emit; pairs without an entry are computed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rule:
    """operators: by their names in aten, without overload; dtypes: as torch writes them in C++"""

    operators: tuple[str, ...]
    dtypes: tuple[str, ...]
    reason: str
    source: str
    version: str


TABLE: tuple[Rule, ...] = ()

MASKS_EXPANDED = (9, 1)  # CANN whose torch_npu (26.1.0) expands a mask: op-plugin 9f593387
MASK_SOURCE = "ops-transformer, flash_attention_score_tiling_general.cpp; diffusers#13490"


def refused() -> dict[tuple[str, str], str]:
    """(operator, dtype) -> reason with its source."""
    return {
        (operator, dtype): f"{rule.reason} ({rule.source}, {rule.version})"
        for rule in TABLE
        for operator in rule.operators
        for dtype in rule.dtypes
    }


def cann() -> tuple[int, ...]:
    """The simulated CANN, by RLXF_SIM_CANN."""
    return tuple(int(part) for part in os.environ.get("RLXF_SIM_CANN", "8.5").split(".")[:2])


def checked_attention(attention: Callable[..., Any]) -> Callable[..., Any]:
    """torch's attention with CANN's rule on bool masks of device tensors."""

    @functools.wraps(attention)
    def wrapper(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        *more: Any,
        **kw: Any,
    ) -> Any:
        if attn_mask is not None and query.device.type == "npu" and cann() < MASKS_EXPANDED:
            check_mask(query, key, attn_mask)
        return attention(query, key, value, attn_mask, *more, **kw)

    return wrapper


def check_mask(query: Tensor, key: Tensor, mask: Tensor) -> None:
    """Raise RuntimeError for a bool mask of another shape than BNSS, B1SS, 11SS or SS."""
    if mask.dtype is not torch.bool or query.dim() != 4:
        return
    batch, heads, scores = query.size(0), query.size(1), (query.size(2), key.size(2))
    known = {(batch, heads, *scores), (batch, 1, *scores), (1, 1, *scores), scores}
    if tuple(mask.shape) not in known:
        raise RuntimeError(
            f"get unsupported atten_mask shape, the shape is {tuple(mask.shape)}. B=[{batch}], "
            f"N=[{heads}], Sq=[{scores[0]}], Skv=[{scores[1]}]: before CANN 9.1 a mask has a row "
            f"for each query ({MASK_SOURCE})"
        )
