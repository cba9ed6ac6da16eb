"""Sums over tensors' bits, to compare copies. It needs torch only, as vLLM's workers run it too."""

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 512  # patterns of 16 bits whose sum is exact in fp32, in any order: 2^9 x 2^15 = 2^24
SUMMED_AT_ONCE = 2**20  # elements, whole blocks, that are copied to fp32; they fit in a CPU's cache


def block_sums(tensor: Tensor) -> Tensor:
    """Return [blocks, 1 or 2] fp32: per block the sums over the elements' bits as integers.

    Each 16 bits are a signed integer; an element's k-th goes to column k. A change in one element
    always changes a sum. Not every device sums integers in 64 bits, and on an NPU fp64 is fp32;
    these sums are exact.
    """
    patterns = tensor.detach().contiguous().view(-1, 1).view(torch.int16)
    sums = []
    for part in patterns.split(SUMMED_AT_ONCE):
        padded = F.pad(part.float(), (0, 0, 0, -len(part) % BLOCK))
        sums.append(padded.unflatten(0, (-1, BLOCK)).sum(dim=1))
    return torch.cat(sums)


def bit_sum(tensor: Tensor) -> int:
    """Return one integer for a tensor's bits, to compare two copies.

    It is the sum of the `block_sums`, row after row, times 1, 2, 3, ..., modulo 2^64: elements that
    moved to another block change it too.
    """
    sums = block_sums(tensor).flatten().cpu().long()
    return int((sums * torch.arange(1, len(sums) + 1)).sum())
