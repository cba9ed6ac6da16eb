"""Means and whitening over masked tensors, optionally over all data-parallel ranks.

all_reduce: returns a tensor's sum over the ranks that share the batch
"""

from collections.abc import Callable

import torch
from torch import Tensor

AllReduce = Callable[[Tensor], Tensor]


def alone(tensor: Tensor) -> Tensor:
    """Return the tensor itself: the `all_reduce` of a single process."""
    return tensor


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the mean of `values` where `mask` is True, over `dim`; None = over all elements.

    NaN where the mask has no True, and where a value outside the mask is infinite or NaN.
    """
    if dim is None:
        return (values * mask).sum() / mask.sum()
    return (values * mask).sum(dim) / mask.sum(dim)


def masked_whiten(
    values: Tensor,
    mask: Tensor,
    all_reduce: AllReduce = alone,
    eps: float = 1e-8,
    shift_mean: bool = True,
) -> Tensor:
    """Return values scaled to mean 0 and variance 1 over the True elements of all ranks.

    0 where the mask is False.
    values:     [...] fp32, on the host (an NPU converts fp64 to fp32); the dtype of the result
    mask:       [...] bool, on the host
    all_reduce: sums a tensor over the ranks; by default this process is the only one
    eps:        added to the variance
    shift_mean: False = the mean stays as it is, not 0 (TRL's whitening of rewards)
    The variance has divisor n - 1, as TRL's. Sums are in fp64, so that the result does not depend
    on the distribution of samples over ranks.
    Errors: ValueError with a single True element on all ranks together.
    """
    wide = values.double()
    first = all_reduce(torch.stack((mask.sum().double(), (wide * mask).sum())))
    count, mean = first[0], first[1] / first[0]
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
