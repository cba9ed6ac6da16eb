"""Attention of packed rows, by operators of a device and without."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import varlen
from transformers import LlamaConfig, modeling_flash_attention_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention

from mindspeed_rlxf.engine.fsdp.attention import (
    Layout,
    _flash_computes,
    attend,
    register,
    try_flash,
    try_varlen,
)

LENGTHS = (3, 5, 1)


def make(heads: int) -> Tensor:
    generator = torch.Generator().manual_seed(heads)
    return torch.randn(1, heads, sum(LENGTHS), 8, generator=generator, dtype=torch.bfloat16)


class Flash:
    """Computes as flash attention does from ends of sequences; [tokens, heads, d].

    Attributes:
        sequences: Lengths of each call's.
        factor: Of the results; 1 is right.
    """

    def __init__(self, factor: float = 1.0) -> None:
        self.sequences: list[list[int]] = []
        self.factor = factor

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
        max_seqlen_q: Any = None, max_seqlen_k: Any = None, causal: bool = False,
        softmax_scale: float | None = None, dropout_p: float = 0.0,
    ) -> Tensor:  # fmt: skip
        lengths = cu_seqlens_q.diff().tolist()
        assert lengths == cu_seqlens_k.diff().tolist() and causal and not dropout_p
        assert max_seqlen_q == max_seqlen_k == max(lengths)
        assert q.size(-1) == k.size(-1) == v.size(-1)
        self.sequences.append(lengths)
        outs = []
        for each in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
            one = (part.transpose(0, 1)[None] for part in each)
            out = F.scaled_dot_product_attention(
                *one, is_causal=True, scale=softmax_scale, enable_gqa=True
            )
            outs.append(out[0].transpose(0, 1))
        return torch.cat(outs) * self.factor


def install(monkeypatch: pytest.MonkeyPatch, flash: Flash) -> None:
    """Make it the operator of this device."""
    register()
    utils = modeling_flash_attention_utils
    monkeypatch.setattr(utils, "_lazy_imports", lambda *_, **__: (flash, flash, None, None, None))
    monkeypatch.setattr(utils, "_loaded_implementation", None)
    try_flash.cache_clear()


def both_ways(layer: Any, *tensors: Tensor, **kinds: Any) -> tuple[Tensor, Tensor]:
    """Attend without and with flash attention."""
    layouts = [Layout(LENGTHS, None, flash) for flash in (False, True)]
    ours, flashed = (attend(layer, *tensors, layout=each, **kinds)[0] for each in layouts)
    return ours, flashed


def test_flash_attention_gets_the_ends_of_the_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    flash = Flash()
    install(monkeypatch, flash)
    torch.testing.assert_close(*both_ways(None, make(4), make(2), make(2), scaling=0.3))
    assert flash.sequences[-1] == [*LENGTHS]


def test_flash_attention_gets_values_as_wide_as_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers 4 calls it, which does not widen them itself."""
    flash = Flash()
    install(monkeypatch, flash)

    def call(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float | None,
        dropout: float, cu_seq_lens_q: Tensor, cu_seq_lens_k: Tensor, max_length_q: int,
        max_length_k: int, **_: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        parts = (each[0].transpose(0, 1) for each in (query, key, value))
        ends = cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k
        return flash(*parts, *ends, module.is_causal, scaling, dropout)[None], None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flash_attention_2", call)
    wide = make(4).float(), make(2).float(), make(2).float()[..., :5]
    ours, flashed = both_ways(None, *wide)
    assert ours.shape == (1, sum(LENGTHS), 4, 5)
    torch.testing.assert_close(flashed, ours)
    assert flash.sequences[-1] == [*LENGTHS]


@pytest.mark.parametrize("factor", [1.2, math.nan])
def test_flash_attention_that_is_wrong_here_is_not_used(
    monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    install(monkeypatch, Flash(factor))
    ours, flashed = both_ways(None, make(4), make(2), make(2))
    assert torch.equal(ours, flashed)


def test_flash_attention_that_fails_here_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ImportError("undefined symbol")

    monkeypatch.setattr(modeling_flash_attention_utils, "lazy_import_flash_attention", fail)
    try_flash.cache_clear()
    ours, flashed = both_ways(None, make(4), make(2), make(2))
    assert torch.equal(ours, flashed)


def test_flash_attention_computes_no_window_or_cap_that_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, Flash())
    query, key, value = make(4), make(4), make(4)
    layer = LlamaAttention(LlamaConfig(hidden_size=32, num_attention_heads=4), 0)
    kinds = {"sliding_window": 2, "scaling": 1.0}
    torch.testing.assert_close(*both_ways(layer, query, key, value, **kinds))
    layout = Layout((5, 4))
    needs = {"softcap": 2.0}, {"sliding_window": 4}, {"sliding_window": 5}, {}
    able = [_flash_computes(query, key, value, layout, kinds) for kinds in needs]
    assert able == [False, False, True, True]


class Varlen:
    """Computes as torch's attention of packed sequences; [tokens, heads, d]."""

    def __init__(self, factor: float = 1.0) -> None:
        self.windows: list[tuple[int, int]] = []
        self.factor = factor  # of the results; 1 is right

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, ends: Tensor, key_ends: Tensor, longest: int,
        longest_key: int, *, scale: float | None, window_size: tuple[int, int], enable_gqa: bool,
    ) -> Tensor:  # fmt: skip
        lengths = ends.diff().tolist()
        assert torch.equal(ends, key_ends) and longest == longest_key == max(lengths)
        self.windows.append(window_size)
        num_before, num_after = window_size
        outs = []
        for each in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
            one = [part.transpose(0, 1)[None] for part in each]
            seen = torch.ones(one[0].size(2), one[0].size(2), dtype=torch.bool).tril(num_after)
            if num_before >= 0:
                seen = seen.triu(-num_before)
            out = F.scaled_dot_product_attention(
                *one, attn_mask=seen, scale=scale, enable_gqa=enable_gqa
            )
            outs.append(out[0].transpose(0, 1))
        return torch.cat(outs) * self.factor


def install_varlen(monkeypatch: pytest.MonkeyPatch, operator: Varlen) -> None:
    """Make it torch's operator, where transformers finds no flash attention."""
    missing = modeling_flash_attention_utils
    monkeypatch.setattr(missing, "lazy_import_flash_attention", lambda *_, **__: 1 / 0)
    monkeypatch.setattr(varlen, "varlen_attn", operator)
    try_flash.cache_clear()
    try_varlen.cache_clear()


def test_packed_sequences_have_windows_in_torchs_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = Varlen()
    install_varlen(monkeypatch, operator)
    layer = LlamaAttention(LlamaConfig(hidden_size=32, num_attention_heads=4), 0)
    layer.num_key_value_groups = 2
    for window in (None, 2):
        kinds = {"sliding_window": window, "scaling": 0.3}
        wide = make(4).float(), make(2).float(), make(2).float()
        torch.testing.assert_close(*both_ways(layer, *wide, **kinds))
    assert operator.windows[-2:] == [(-1, 0), (1, 0)]


def test_torchs_operator_that_is_wrong_here_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    install_varlen(monkeypatch, Varlen(1.2))
    ours, packed = both_ways(None, make(4), make(2), make(2))
    assert torch.equal(ours, packed)


def test_sequences_do_not_see_each_other() -> None:
    query, key, value = make(4), make(2), make(2)
    layout, layer = Layout(LENGTHS), SimpleNamespace()
    before = attend(layer, query, key, value, layout=layout)[0]
    key[:, :, 0] += 1
    after = attend(layer, query, key, value, layout=layout)[0]
    moved = (before != after).flatten(2).any(2)[0].tolist()
    assert moved == [False, *[True] * 2, *[False] * 6]  # its first token sees itself alone
