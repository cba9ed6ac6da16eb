"""Calls of Megatron's core attention where MindSpeed computes it."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from mindspeed_rlxf.models import attention
from mindspeed_rlxf.models.attention import CoreAttention, FusedAttention, PackedSequences

LENGTHS = (3, 1, 4, 2)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The cumulative lengths of each call, whose sequences attend one by one."""
    asked: list[Any] = []

    def forward(
        self: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, mask_type: Any = None,
        bias: Any = None, packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:  # fmt: skip
        assert mask is None and mask_type is AttnMaskType.causal
        assert packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        asked.append(packed_seq_params.cu_seqlens_q)
        assert packed_seq_params.cu_seqlens_kv == packed_seq_params.cu_seqlens_q
        lengths = [last - first for first, last in pairwise([0, *packed_seq_params.cu_seqlens_q])]
        return PackedSequences(lengths=tuple(lengths)).attend(1, query, key, value).flatten(1)

    monkeypatch.setattr(DotProductAttention, "forward", forward)
    return asked


def built(kind: type[torch.nn.Module]) -> Any:
    """A core attention of layer 1, without the parallel groups that its constructor asks for."""
    module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    module.layer_number, module.attn_mask_type = 1, AttnMaskType.causal
    return module


def inputs() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(sum(LENGTHS), heads, 8) for heads in (4, 2, 2)]


@pytest.mark.parametrize(("at_once", "calls"), [(1024, [[3, 4, 8, 10]]), (3, [[3, 4, 8], [2]])])
def test_packed_sequences_attend_as_on_cpu(
    ends: list[Any], monkeypatch: pytest.MonkeyPatch, at_once: int, calls: list[list[int]]
) -> None:
    """at_once: sequences that the operator takes"""
    monkeypatch.setattr(attention, "MAX_FUSED_SEQUENCES", at_once)
    packed = PackedSequences(lengths=LENGTHS)
    found = built(FusedAttention)(*inputs(), None, packed_seq_params=packed)
    expected = built(CoreAttention)(*inputs(), None, packed_seq_params=packed)
    torch.testing.assert_close(found, expected)
    assert ends == calls  # sums of the lengths, as a list without a leading 0
