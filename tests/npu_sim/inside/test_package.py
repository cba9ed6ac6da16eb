"""The package works on the simulated device, and fails there when a needed line is removed."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch


def test_a_decode_step_gives_a_mask_row_to_each_query(put_fault):
    from mindspeed_rlxf.rollout.kv_cache import CacheShape, DecodeStep, KvCache

    shape = CacheShape(num_layers=1, groups=2, head_dim=4, dtype=torch.float32)
    cache = KvCache(shape, 6, torch.device("npu", 0))
    cache.fit(3, 6)
    step = DecodeStep(cache=cache, position=torch.tensor([2, 3], device="npu"))
    heads = [torch.ones(2, heads, 4, device="npu") for heads in (4, 2, 2)]
    assert step.attend(1, *heads).shape == (2, 4, 4)
    put_fault(DecodeStep, "attend", "self._mask.expand(-1, -1, queries.size(2), -1)", "self._mask")
    with pytest.raises(RuntimeError, match="a mask has a row for each query"):
        step.attend(1, *heads)


def test_a_pack_is_attended_sequence_by_sequence():
    from mindspeed_rlxf.models.attention import PackedSequences

    attention = fused_attention()
    pack = PackedSequences(lengths=(2, 3))
    heads = [torch.randn(5, n, 4, device="npu") for n in (4, 2, 2)]
    together = attention(*heads, None, packed_seq_params=pack)
    alone = [attention(*(x[part] for x in heads), None, packed_seq_params=PackedSequences(
        lengths=(part.stop - part.start,))) for part in (slice(0, 2), slice(2, 5))]  # fmt: skip
    torch.testing.assert_close(together.cpu(), torch.cat(alone).cpu())


def test_responses_share_a_prompt_by_the_operator_of_the_device():
    from mindspeed_rlxf.device import kernels
    from mindspeed_rlxf.models.attention import SharedPrompts, shares_prompts

    attention = fused_attention()
    assert shares_prompts(attention)
    pack = SharedPrompts(lengths=(3, 2, 4), prompts=(None, 0, 0))
    heads = [torch.randn(9, n, 4, device="npu") for n in (4, 2, 2)]
    found = attention(*heads, None, packed_seq_params=pack)
    expected = pack.attend(1, *(x.cpu() for x in heads))
    torch.testing.assert_close(found.cpu(), expected.flatten(1))
    assert kernels.find(kernels.Operator.SHARED_PROMPTS, 4, 2, 4) is not None


def fused_attention() -> Any:
    from megatron.core.transformer.enums import AttnMaskType

    from mindspeed_rlxf.models.attention import FusedAttention

    made = FusedAttention.__new__(FusedAttention)
    torch.nn.Module.__init__(made)
    made.softmax_scale, made.layer_number = 0.5, 1
    made.attn_mask_type = AttnMaskType.causal
    made.config = SimpleNamespace(
        tensor_model_parallel_size=1, num_attention_heads=4, num_query_groups=2, kv_channels=4
    )
    return made


def test_a_sleeping_rollout_module_lies_on_the_device(put_fault):
    """Megatron makes it on the host, and generation asks it for its device."""
    from mindspeed_rlxf.rollout.weights import SharedWeights

    source = SharedWeights.__new__(SharedWeights)
    source._kept_on_device = contextlib.ExitStack()
    source._parameters = {("w",): torch.nn.Parameter(torch.ones(2))}
    source.sleep()
    assert source._parameters[("w",)].device.type == "npu"
    put_fault(SharedWeights, "sleep", "new_empty(0, device=where)", "new_empty(0)")
    source._parameters = {("w",): torch.nn.Parameter(torch.ones(2))}
    source.sleep()
    assert source._parameters[("w",)].device.type == "cpu"
