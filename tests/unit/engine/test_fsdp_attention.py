"""Attention of packed rows, by operators of a device and without."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, modeling_flash_attention_utils
from transformers.models.llama.modeling_llama import LlamaAttention

from mindspeed_rlxf.engine.fsdp.attention import Layout, _flash_computes, attend, register

LENGTHS = (3, 5, 1)


def make(heads: int) -> Tensor:
    generator = torch.Generator().manual_seed(heads)
    return torch.randn(1, heads, sum(LENGTHS), 8, generator=generator, dtype=torch.bfloat16)


def flash(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
    max_seqlen_q: Any = None, max_seqlen_k: Any = None, causal: bool = False,
    softmax_scale: float | None = None, dropout_p: float = 0.0,
) -> Tensor:  # fmt: skip
    """Compute as flash attention does from ends of sequences; [tokens, heads, d]."""
    assert causal and max_seqlen_q == max_seqlen_k == max(LENGTHS) and not dropout_p
    cuts = cu_seqlens_q.diff().tolist()
    assert cuts == cu_seqlens_k.diff().tolist() == [*LENGTHS]
    found = []
    for each in zip(q.split(cuts), k.split(cuts), v.split(cuts), strict=True):
        one = (part.transpose(0, 1)[None] for part in each)
        out = F.scaled_dot_product_attention(
            *one, is_causal=True, scale=softmax_scale, enable_gqa=True
        )
        found.append(out[0].transpose(0, 1))
    return torch.cat(found)


def test_flash_attention_gets_the_ends_of_the_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    utils = modeling_flash_attention_utils
    monkeypatch.setattr(utils, "_lazy_imports", lambda *_, **__: (flash, flash, None, None, None))
    monkeypatch.setattr(utils, "_loaded_implementation", None)
    query, key, value = make(4), make(2), make(2)
    layer = SimpleNamespace(config=SimpleNamespace(_attn_implementation="ours"))
    scale = 1 / math.sqrt(8)
    layouts = [Layout(LENGTHS, None, flash) for flash in (False, True)]
    ours, flashed = (attend(layer, query, key, value, None, scale, layout=x)[0] for x in layouts)
    torch.testing.assert_close(ours, flashed)


def test_flash_attention_computes_no_window_or_cap_that_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    utils = modeling_flash_attention_utils
    monkeypatch.setattr(utils, "_lazy_imports", lambda *_, **__: (flash, flash, None, None, None))
    monkeypatch.setattr(utils, "_loaded_implementation", None)
    query, key, value = make(4), make(4), make(4)
    layer = LlamaAttention(LlamaConfig(hidden_size=32, num_attention_heads=4), 0)
    kinds = {"sliding_window": 2, "scaling": 1.0}
    layouts = [Layout(LENGTHS, None, flash) for flash in (False, True)]
    ours, flashed = (attend(layer, query, key, value, layout=x, **kinds)[0] for x in layouts)
    torch.testing.assert_close(ours, flashed)
    assert [_flash_computes({"softcap": 2.0}, 5), _flash_computes({}, 5)] == [False, True]


def test_sequences_do_not_see_each_other() -> None:
    query, key, value = make(4), make(2), make(2)
    layout, layer = Layout(LENGTHS), SimpleNamespace()
    before = attend(layer, query, key, value, layout=layout)[0]
    key[:, :, 0] += 1
    after = attend(layer, query, key, value, layout=layout)[0]
    moved = (before != after).flatten(2).any(2)[0].tolist()
    assert moved == [False, *[True] * 2, *[False] * 6]  # its first token sees itself alone
