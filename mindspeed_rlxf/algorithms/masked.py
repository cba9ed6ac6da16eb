"""Means and whitening over masked tensors, optionally summed over data-parallel ranks.

all_reduce: adds a tensor up over the ranks that share the batch; the identity on one process.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

AllReduce = Callable[[Tensor], Tensor]


def alone(tensor: Tensor) -> Tensor:
    """The `all_reduce` of a single process."""
    return tensor


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the mean of `values` where `mask` is True, over `dim` or over all.

    Errors: none; a row without any True gives nan.
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
    """Whiten values to mean 0 and variance 1 over all True places of all ranks; 0 elsewhere.

    shift_mean: False keeps the mean as it was (TRL's whitening of rewards).

    The variance has divisor n - 1 (as TRL's); sums run in fp64, so that the result does not depend
    on how samples are spread over ranks.
    values: [...] fp32; mask: [...] bool; both on the host, as an NPU makes fp32 of fp64
    Errors: ValueError with fewer than two True places.
    """
    wide = values.double()
    first = all_reduce(torch.stack((mask.sum().double(), (wide * mask).sum())))
    count, mean = first[0], first[1] / first[0]
    if int(count) < 2:
        raise ValueError(
            f"whitening needs at least two tokens, the batch has {int(count)}; "
            "use a larger batch or algorithm.advantage_whiten=none"
        )
    deviation = (wide - mean) * mask
    variance = all_reduce((deviation**2).sum()) / (count - 1)
    whitened = deviation * torch.rsqrt(variance + eps)
    return (whitened if shift_mean else whitened + mean * mask).to(values.dtype)
