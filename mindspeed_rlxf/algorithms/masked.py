"""Masked means and whitening, optionally over all data-parallel ranks.

`all_reduce` returns a tensor's sum over the ranks that share the batch.
"""

from collections.abc import Callable

import torch
from torch import Tensor

AllReduce = Callable[[Tensor], Tensor]


def alone(tensor: Tensor) -> Tensor:
    """Return the tensor itself: `all_reduce` for a single process."""
    return tensor


def masked_mean(values: Tensor, mask: Tensor, dim: int) -> Tensor:
    """Return the mean over True elements along `dim`.

    NaN if the mask has no True, or if a value outside it is NaN or infinite.
    """
    return (values * mask).sum(dim) / mask.sum(dim)


def masked_whiten(
    values: Tensor,
    mask: Tensor,
    all_reduce: AllReduce = alone,
    eps: float = 1e-8,
    shift_mean: bool = True,
) -> Tensor:
    """Scale values to mean 0 and variance 1 over the True elements on all ranks.

    The variance has divisor n - 1, like TRL's. Sums are in fp64, so results do not depend on how
    samples are distributed over ranks.

    Args:
        values: [...] fp32, on the host (an NPU converts fp64 to fp32).
        mask: [...] bool, on the host. The result is 0 outside.
        all_reduce: Sums a tensor over the ranks; by default this process is the only one.
        eps: Added to the variance.
        shift_mean: False keeps the mean (TRL's reward whitening).

    Raises:
        ValueError: There is a single True element on all ranks together.
    """
    wide = values.double()
    sums = all_reduce(torch.stack((mask.sum().double(), (wide * mask).sum())))
    count = sums[0]
    mean = sums[1] / count
    if not count:  # no response could be scored
        return torch.zeros_like(values)
    if int(count) < 2:
        raise ValueError(
            "whitening needs at least two tokens, the batch has one; use a larger batch or "
            "algorithm.advantage_whiten=none"
        )
    deviation = (wide - mean) * mask
    variance = all_reduce((deviation**2).sum()) / (count - 1)
    whitened = deviation * torch.rsqrt(variance + eps)
    return (whitened if shift_mean else whitened + mean * mask).to(values.dtype)
