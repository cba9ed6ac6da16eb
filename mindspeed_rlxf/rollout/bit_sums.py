"""Sums over tensors' bits, to compare copies. It needs torch only, as vLLM's workers run it too."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 512  # elements; 16 bits times their numbers, up to 512, are below 2^24
SUMMED_AT_ONCE = 2**18  # elements, whole blocks, whose products fit in a CPU's cache
LOW = 2**12  # products are split by it into two parts whose sums over a block are exact in fp32
HALF = 2**16
FACTOR = 0x1E3779B97F4A7C15  # odd, so that its powers modulo 2^64 are all different for long


def block_sums(tensor: Tensor) -> Tensor:
    """Return per block the weighted sum over the bits of its 512 elements.

    Each element's bits are a signed integer, times 1, 2, 3, ... in the order of the block's
    elements. A change in one element, or of two that change places, always changes a sum.

    Returns:
        [blocks] int64. Not every device sums integers in 64 bits, and on an NPU fp64 is fp32: on
        those [blocks, 2 or 5] fp32, of which `_whole_numbers` makes the sums.
    """
    if tensor.device.type not in ("cpu", "cuda"):
        return _fp32_block_sums(tensor)
    is_wide = tensor.itemsize == 4
    patterns = tensor.detach().contiguous().view(-1)
    patterns = patterns.view(torch.int32 if is_wide else torch.int16)
    # Products of 16 bits fit in 32.
    dtype = torch.int64 if is_wide else torch.int32
    numbers = torch.arange(1, BLOCK + 1, dtype=dtype, device=tensor.device)
    sums = []
    for split in patterns.split(SUMMED_AT_ONCE):
        if len(split) % BLOCK:
            split = F.pad(split, (0, -len(split) % BLOCK))
        sums.append((split.view(-1, BLOCK) * numbers).sum(dim=1))
    return torch.cat(sums)


def _fp32_block_sums(tensor: Tensor) -> Tensor:
    """Return [blocks, 2 or 5] fp32, exact parts of the `block_sums`.

    A product of 16 bits and an element's number is high * LOW + low. Columns: low and high of an
    element with 16 bits; else those of its lower and of its upper half, and the numbers of elements
    with a negative lower half.
    """
    halves = tensor.detach().contiguous().view(-1, 1).view(torch.int16)
    numbers = torch.arange(1, BLOCK + 1, dtype=torch.float32, device=tensor.device)[:, None]
    sums = []
    for split in halves.split(SUMMED_AT_ONCE):
        padded = F.pad(split.float(), (0, 0, 0, -len(split) % BLOCK)).unflatten(0, (-1, BLOCK))
        products = padded * numbers
        high = (products / LOW).floor()
        low = products - high * LOW
        columns = [torch.stack((low, high), dim=-1).sum(dim=1).flatten(1)]
        if halves.size(1) == 2:
            columns.append(((padded[..., :1] < 0) * numbers).sum(dim=1))
        sums.append(torch.cat(columns, dim=1))
    return torch.cat(sums)


def _whole_numbers(sums: Tensor) -> Tensor:
    """Return `block_sums` as [blocks] int64; on the host if they are parts in fp32."""
    if sums.dtype is torch.int64:
        return sums
    parts = sums.cpu().long()
    lower = parts[:, 0] + LOW * parts[:, 1]
    if parts.size(1) == 2:
        return lower
    upper = parts[:, 2] + LOW * parts[:, 3]
    return lower + HALF * (upper + parts[:, 4])


_powers_by_device = dict[torch.device, Tensor]()


def _powers(count: int, device: torch.device) -> Tensor:
    """Return FACTOR, its square, and so on, modulo 2^64, [count] int64.

    Those of the largest tensor so far are kept, 8 bytes for 512 elements.
    """
    powers = _powers_by_device.get(device)
    if powers is None or len(powers) < count:
        powers = _powers_by_device[device] = torch.full((count,), FACTOR).cumprod(0).to(device)
    return powers[:count]


def bit_sums(tensors: Sequence[Tensor]) -> list[int]:
    """Return one integer for each tensor's bits in their order; waits for the device once.

    It is the sum of the `block_sums` times the powers of FACTOR, modulo 2^64.
    """
    totals = []
    for tensor in tensors:
        sums = _whole_numbers(block_sums(tensor))
        totals.append((sums * _powers(len(sums), sums.device)).sum())
    return torch.stack(totals).tolist() if totals else []


def bit_sum(tensor: Tensor) -> int:
    """Return the only one of `bit_sums`."""
    return bit_sums([tensor])[0]
