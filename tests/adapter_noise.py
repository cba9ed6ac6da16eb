"""Values for adapters in tests."""

import torch
from torch import Tensor


def noise(name: str, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Return values for an adapter in place of `initial_values`, whose B is 0."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randn(shape, generator=generator) * 0.2
