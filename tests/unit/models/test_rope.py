"""Frequencies and angles against transformers' LlamaRotaryEmbedding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.models.attention import inverse_frequencies, rotary_angles

LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
CASES = [
    (None, {}, {"rope_type": "default"}),
    ("linear", {"rope_scaling_factor": 4.0}, LINEAR),
    (
        "llama3",
        {"rope_scaling_factor": 8.0, "original_max_position_embeddings": 128},
        LLAMA3,
    ),
]


def architecture(scaling: str | None = None, **keys: Any) -> ArchitectureConfig:
    return ArchitectureConfig(
        num_layers=1,
        hidden_size=64,
        ffn_hidden_size=64,
        num_attention_heads=2,
        kv_channels=48,
        vocab_size=8,
        max_position_embeddings=1024,
        rotary_base=500.0,
        rope_scaling_type=scaling,
        **keys,
    )


def theirs(rope: dict[str, Any]) -> LlamaRotaryEmbedding:
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        head_dim=48,
        max_position_embeddings=1024,
        rope_theta=500.0,  # version 5 reads this older spelling too
        rope_scaling=rope,
    )
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize(("scaling", "keys", "rope"), CASES)
def test_frequencies_are_those_of_transformers(
    scaling: str | None, keys: dict[str, Any], rope: dict[str, Any]
) -> None:
    ours = inverse_frequencies(architecture(scaling, **keys))
    assert ours.shape == (24,) and ours.dtype == torch.float32
    assert_close(ours, theirs(rope).inv_freq)


def test_angles_are_those_of_transformers() -> None:
    positions = torch.tensor([0, 1, 5, 700, 3, 0])
    angles = rotary_angles(positions, inverse_frequencies(architecture()))
    assert angles.shape == (6, 1, 1, 48)
    cosine, sine = theirs({"rope_type": "default"})(torch.zeros(1, 1), positions[None])
    assert_close(angles[:, 0, 0].cos(), cosine[0])
    assert_close(angles[:, 0, 0].sin(), sine[0])
