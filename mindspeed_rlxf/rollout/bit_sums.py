"""Sums over tensors' bits, to compare copies. It needs torch only, as vLLM's workers run it too."""

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 512  # patterns of 16 bits; times their numbers, up to 512, they are below 2^24
SUMMED_AT_ONCE = 2**20  # elements, whole blocks, that are copied to fp32; they fit in a CPU's cache
LOW = 2**12  # products are split by it into two parts whose sums over a block are exact in fp32
FACTOR = 0x1E3779B97F4A7C15  # odd, so that its powers modulo 2^64 are all different for long


def block_sums(tensor: Tensor) -> Tensor:
    """Return [blocks, 2 or 4] fp32: per block the weighted sums over the elements' bits.

    Each 16 bits are a signed integer, times 1, 2, 3, ... in the order of the block's elements; the
    product is high * LOW + low. An element's k-th 16 bits go to columns k (low) and k + their
    number (high). A change in one element, or of two that change places, always changes a sum. Not
    every device sums integers in 64 bits, and on an NPU fp64 is fp32; these sums are exact.
    """
    patterns = tensor.detach().contiguous().view(-1, 1).view(torch.int16)
    numbers = torch.arange(1, BLOCK + 1, dtype=torch.float32, device=tensor.device)[:, None]
    sums = []
    for split in patterns.split(SUMMED_AT_ONCE):
        padded = F.pad(split.float(), (0, 0, 0, -len(split) % BLOCK))
        products = padded.unflatten(0, (-1, BLOCK)) * numbers
        high = (products / LOW).floor()
        low = products - high * LOW
        sums.append(torch.cat((low.sum(dim=1), high.sum(dim=1)), dim=1))
    return torch.cat(sums)


def bit_sum(tensor: Tensor) -> int:
    """Return one integer for a tensor's bits in their order, to compare two copies.

    It is the sum of the `block_sums`, row after row, times the powers of FACTOR, modulo 2^64.
    """
    sums = block_sums(tensor).flatten().cpu().long()
    return int((sums * torch.full_like(sums, FACTOR).cumprod(0)).sum())
