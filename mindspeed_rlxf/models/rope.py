"""Rotary position frequencies (arXiv:2104.09864), with linear and Llama-3 scaling.

The Llama-3 rule keeps high frequencies, divides low ones by `rope_scaling_factor` and blends
between. It follows transformers' `rope_type: llama3`, so that imported models get the same angles.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mindspeed_rlxf.config.schema import ArchitectureConfig


def inverse_frequencies(architecture: ArchitectureConfig) -> Tensor:
    """Return the angle per position of each pair of a head's elements, scaled if configured.

    Returns [head_dim / 2] fp32 on the CPU.
    """
    a = architecture
    exponents = torch.arange(0, a.head_dim, 2, dtype=torch.int64).float() / a.head_dim
    inverse = 1.0 / (a.rotary_base**exponents)
    if a.rope_scaling_type == "linear":
        return inverse / a.rope_scaling_factor
    if a.rope_scaling_type == "llama3":
        return _llama3(inverse, a)
    return inverse


def _llama3(inverse: Tensor, a: ArchitectureConfig) -> Tensor:
    """Return frequencies scaled as in Llama 3, [head_dim / 2]."""
    assert a.original_max_position_embeddings, "llama3 scaling needs the original length"
    original = a.original_max_position_embeddings
    wavelength = 2 * math.pi / inverse
    low, high = original / a.low_freq_factor, original / a.high_freq_factor
    blend = (original / wavelength - a.low_freq_factor) / (a.high_freq_factor - a.low_freq_factor)
    blended = (1 - blend) * inverse / a.rope_scaling_factor + blend * inverse
    scaled = torch.where(wavelength > low, inverse / a.rope_scaling_factor, inverse)
    between = (wavelength <= low) & (wavelength >= high)
    return torch.where(between, blended, scaled)


def rotary_angles(positions: Tensor, inverse: Tensor) -> Tensor:
    """Return position * frequency in Megatron's form, [tokens, 1, 1, head_dim] fp32.

    The frequencies stand twice, for both halves of a head.

    positions: [tokens] int64
    inverse:   frequencies [head_dim / 2]
    """
    angles = positions.to(torch.float32)[:, None] * inverse[None, :]
    return torch.cat((angles, angles), dim=-1)[:, None, None, :]
