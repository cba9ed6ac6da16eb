"""Fused operators are used only where they compute what plain torch computes."""

import logging
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mindspeed_rlxf import device
from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.device import kernels
from mindspeed_rlxf.device.kernels import Operator, Source
from mindspeed_rlxf.models.attention import CoreAttention, PackedSequences, causal_attention
from mindspeed_rlxf.models.transformer import RMSNorm, plain_norm, transformer_config

CPU = torch.device("cpu")


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process believes that it has a device whose kernels may be tried."""
    monkeypatch.setattr(device, "tries_kernels", lambda: True)
    monkeypatch.setattr(device, "current_device", lambda: CPU)
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    kernels.find.cache_clear()
    yield
    kernels.find.cache_clear()
    torch.use_deterministic_algorithms(deterministic)


def probe_of(operator: Operator) -> Any:
    (probe,) = {row.probe for row in kernels.TABLE if row.operator is operator}
    return probe


def attend(query: Tensor, key: Tensor, value: Tensor, lengths: Any, _: Any = None) -> Tensor:
    return PackedSequences(lengths=tuple(lengths)).attend(1, query, key, value)


def attention(shift: bool) -> Any:
    """Attention with more keys than queries, causal to the last key, or from the first one."""

    def call(query: Tensor, key: Tensor, value: Tensor, lengths: Any, key_lengths: Any) -> Tensor:
        outs = []
        parts = query.split(lengths), key.split(key_lengths), value.split(key_lengths)
        for q, k, v in zip(*parts, strict=True):
            rows = [x.transpose(0, 1)[None] for x in (q, k, v)]
            mask = torch.ones(len(q), len(k), dtype=torch.bool)
            mask = mask.tril(len(k) - len(q) if shift else 0)
            out = F.scaled_dot_product_attention(*rows, attn_mask=mask, enable_gqa=True)
            outs.append(out[0].transpose(0, 1))
        return torch.cat(outs)

    return call


def attend_across(query: Tensor, key: Tensor, value: Tensor, lengths: Any, _: Any = None) -> Tensor:
    """Tokens see the sequences before their own."""
    rows = (x.transpose(0, 1)[None] for x in (query, key, value))
    return causal_attention(*rows)[0].transpose(0, 1)


class Norm(torch.nn.Module):
    def __init__(self, size: int, eps: float, params_dtype: torch.dtype, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=params_dtype))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, hidden.shape[-1:], self.weight, self.eps)


class LayerNorm(Norm):
    def forward(self, hidden: Tensor) -> Tensor:
        return F.layer_norm(hidden, hidden.shape[-1:], self.weight, eps=self.eps)


def rotate(query: Tensor, angles: Tensor) -> Tensor:
    first, second = query.chunk(2, dim=-1)
    cos, sin = angles.cos().to(query.dtype), angles.sin().to(query.dtype)
    return query * cos + torch.cat((-second, first), dim=-1) * sin


def swiglu(both: Tensor, bias: None, of_up: Any = torch.clone) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * of_up(up)


def accumulate(inputs: Tensor, grads: Tensor, total: Tensor) -> None:
    total += grads.float().t() @ inputs.float()


def attend_to_cache(query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=~hidden, enable_gqa=True)


@pytest.mark.parametrize(("operator", "right", "wrong"), [
    (Operator.ATTENTION, attend, attend_across),
    (Operator.SHARED_PROMPTS, attention(shift=True), attention(shift=False)),
    (Operator.DECODE, attend_to_cache, lambda q, k, v, hidden: attend_to_cache(q, k, v, ~hidden)),
    (Operator.NORM, Norm, LayerNorm),
    (Operator.ROTARY, rotate, lambda x, angles: rotate(x, angles) if x.dim() == 4 else x),
    (Operator.SWIGLU, swiglu, lambda both, _: swiglu(both, None, torch.Tensor.detach)),
    (Operator.GRADIENT, accumulate, lambda x, g, total: total.copy_(g.float().t() @ x.float())),
])  # fmt: skip
def test_each_probe_takes_its_operator_and_refuses_another(operator, right, wrong):
    probe = probe_of(operator)
    probe(right, CPU)
    with pytest.raises((AssertionError, RuntimeError)):
        probe(wrong, CPU)


def rotate_rows(query: Tensor, angles: Tensor) -> Tensor:
    """Rotates as Transformer Engine, which takes nothing but [tokens, batch, heads, d]."""
    tokens, _, _, width = query.shape
    assert angles.shape == (tokens, 1, 1, width)
    return rotate(query, angles)


def test_a_fused_rotary_embedding_without_packs_rotates_packed_tokens(on_cuda, monkeypatch):
    """As Megatron calls it: packed tokens have no batch axis, and padded rows have one."""
    given = lambda: kernels.with_batch_axis(rotate_rows)  # noqa: E731
    probe = probe_of(Operator.ROTARY)
    monkeypatch.setattr(kernels, "TABLE", [Source(Operator.ROTARY, "rows", given, probe)])
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", None)
    architecture = ArchitectureConfig(
        num_layers=1, hidden_size=32, ffn_hidden_size=32, num_attention_heads=2, vocab_size=8,
        max_position_embeddings=8,
    )  # fmt: skip
    config = transformer_config(architecture, dtype=torch.bfloat16)
    assert config.apply_rope_fusion
    for shape in ((5, 2, 16), (5, 3, 2, 16)):
        query = torch.randn(shape)
        angles = torch.randn(5, *[1] * (len(shape) - 2), 16)
        alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
        found = rope_utils.apply_rotary_pos_emb(query, angles, config, cp_group=alone)
        torch.testing.assert_close(found, rotate(query, angles))


def test_the_norm_of_torch_is_a_source_of_its_own(on_cuda, monkeypatch):
    """Where Transformer Engine is missing."""
    norm = kernels.find(Operator.NORM)
    assert norm is kernels.TorchNorm
    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=2, params_dtype=torch.bfloat16
    )
    fused = plain_norm(config)(config, 64)
    hidden = kernels.noise(CPU, 8, 1, 64)
    plain = RMSNorm(config, 64).bfloat16()
    kernels.assert_close(fused(hidden), plain(hidden), (hidden,))
    assert fused.weight.sequence_parallel is False


def test_the_first_source_that_works_is_taken_and_the_log_says_why(on_cuda, monkeypatch, caplog):
    def absent() -> Any:
        raise ImportError("No module named 'fast'")

    probe = probe_of(Operator.ATTENTION)
    table = [
        Source(Operator.ATTENTION, "fast", absent, probe),
        Source(Operator.ATTENTION, "faulty", lambda: attend_across, probe),
        Source(Operator.ATTENTION, "good", lambda: attend, probe),
    ]
    monkeypatch.setattr(kernels, "TABLE", table)
    with caplog.at_level(logging.INFO):
        assert kernels.find(Operator.ATTENTION) is attend
        assert kernels.find(Operator.NORM) is None
    first, second, *rest = [record.getMessage() for record in caplog.records]
    assert "fast does not work here (ImportError: No module named 'fast')" in first
    assert "faulty does not work here (AssertionError: " in second
    assert rest == [
        "attention of packed sequences: good", "root-mean-square norm: plain torch",
    ]  # fmt: skip


def test_packed_bf16_tokens_go_to_the_kernel_and_fp32_ones_do_not(on_cuda, monkeypatch):
    asked: list[Any] = []

    def kernel(*arguments: Any) -> Tensor:
        asked.append(arguments[3])
        return attend(*arguments)

    table = [Source(Operator.ATTENTION, "kernel", lambda: kernel, probe_of(Operator.ATTENTION))]
    monkeypatch.setattr(kernels, "TABLE", table)
    for dtype in (torch.bfloat16, torch.float32):
        config = TransformerConfig(
            num_layers=1, hidden_size=16, num_attention_heads=2, params_dtype=dtype
        )
        core = CoreAttention(config, 1)
        asked.clear()
        qkv = [torch.randn(7, 2, 8, dtype=dtype) for _ in range(3)]
        core(*qkv, None, packed_seq_params=PackedSequences(lengths=(3, 4)))
        assert asked == ([(3, 4)] if dtype is torch.bfloat16 else [])


def test_the_offsets_of_a_pack_are_uploaded_once_for_all_layers(monkeypatch):
    uploads, plain = [], torch.tensor

    def attend_by_ends(query, key, value, ends, *_, **__):
        return attend(query, key, value, ends.diff().tolist())

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        uploads.extend([args] if kwargs.get("dtype") is torch.int32 else [])
        return plain(*args, **kwargs)

    monkeypatch.setitem(
        sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=attend_by_ends)
    )
    kernel = next(row.load() for row in kernels.TABLE if row.name == "flash_attn")
    monkeypatch.setattr(torch, "tensor", counted)
    qkv = [torch.randn(28, 2, 8) for _ in range(3)]
    for lengths in ((21, 7), (28,)):
        pack = PackedSequences(lengths=lengths)
        found = [pack.attend(layer, *qkv, kernel) for layer in range(1, 29)]
        torch.testing.assert_close(found[-1], pack.attend(1, *qkv))
    assert len(uploads) == 2


def test_a_kernel_that_refuses_the_heads_of_a_model_is_left_out_for_it_alone(on_cuda, monkeypatch):
    """Models of 8 heads on two ranks; the width of a head and the groups on a rank differ."""
    asked: list[tuple[int, ...]] = []

    def narrow(query: Tensor, key: Tensor, value: Tensor, lengths: Any, _: Any) -> Tensor:
        asked.append((query.size(1), key.size(1), query.size(2)))
        assert query.size(2) <= 256, "head dimension over 256"
        return attend(query, key, value, lengths)

    table = [Source(Operator.ATTENTION, "narrow", lambda: narrow, probe_of(Operator.ATTENTION))]
    monkeypatch.setattr(kernels, "TABLE", table)
    models = ((128, 4, 2, narrow), (264, 4, 2, None), (96, 1, 1, narrow))
    for width, groups, on_rank, found in models:
        config = TransformerConfig(
            num_layers=1, hidden_size=64, num_attention_heads=8, num_query_groups=groups,
            kv_channels=width, params_dtype=torch.bfloat16,
        )  # fmt: skip
        config.tensor_model_parallel_size = 2  # older Megatrons refuse one group on two ranks
        asked.clear()
        assert [CoreAttention(config, layer).packed_kernel for layer in (1, 2)] == [found] * 2
        assert asked == [(4, on_rank, width)], "one probe for the layers of a model"


def test_no_kernel_is_tried_on_cpu_or_in_deterministic_mode(on_cuda, monkeypatch):
    table = [Source(Operator.SWIGLU, "any", lambda: swiglu, lambda *_: None)]
    monkeypatch.setattr(kernels, "TABLE", table)
    torch.use_deterministic_algorithms(True)
    assert kernels.find(Operator.SWIGLU) is None
    torch.use_deterministic_algorithms(False)
    kernels.find.cache_clear()
    assert kernels.find(Operator.SWIGLU) is swiglu
    monkeypatch.undo()
    kernels.find.cache_clear()
    assert not device.tries_kernels() and kernels.find(Operator.SWIGLU) is None
