"""Frequencies against transformers' LlamaRotaryEmbedding."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.models.attention import inverse_frequencies

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip
SIZES = {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 1024}


@pytest.mark.parametrize(
    ("scaling", "keys", "rope"),
    [
        (None, {}, {"rope_type": "default"}),
        ("linear", {"rope_scaling_factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ("llama3", {"rope_scaling_factor": 8.0, "original_max_position_embeddings": 128}, LLAMA3),
    ],
)
def test_frequencies_are_those_of_transformers(
    scaling: str | None, keys: dict[str, Any], rope: dict[str, Any]
) -> None:
    architecture = ArchitectureConfig(
        **SIZES, num_layers=1, ffn_hidden_size=64, kv_channels=48, vocab_size=8, rotary_base=500.0,
        rope_scaling_type=scaling, **keys,
    )  # fmt: skip
    # Version 5 of transformers reads this older spelling of `rope_theta` too.
    theirs = LlamaConfig(**SIZES, head_dim=48, rope_theta=500.0, rope_scaling=rope)
    ours = inverse_frequencies(architecture)
    assert ours.shape == (24,) and ours.dtype == torch.float32
    assert_close(ours, LlamaRotaryEmbedding(theirs).inv_freq)
