"""Send trained weights to the ranks that only generate, as Hugging Face tensors in buckets.

The first training rank broadcasts each bucket, then its tensors' checksums: exact sums over their
bit patterns as integers, in blocks with BLOCK elements. Both sides know names and shapes from the
architecture, so nothing else is sent.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from math import prod

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mindspeed_rlxf import device

BUCKET_BYTES = 256 * 1024**2  # of one bucket; a larger tensor has a bucket of its own
BLOCK = 512  # patterns of 16 bits whose sum is exact in fp32, in any order: 2^9 x 2^15 = 2^24
SUMMED_AT_ONCE = 2**20  # elements, whole blocks, that are copied to fp32; they fit in a CPU's cache

Bucket = dict[str, tuple[int, ...]]
"""Names and shapes of the tensors that are sent together."""


def make_buckets(shapes: Mapping[str, tuple[int, ...]], itemsize: int) -> list[Bucket]:
    """Put tensors, in order, into buckets with at most BUCKET_BYTES or one tensor."""
    buckets: list[Bucket] = []
    room = 0
    for name, shape in shapes.items():
        num_bytes = prod(shape) * itemsize
        if num_bytes > room:
            buckets.append({})
            room = BUCKET_BYTES
        buckets[-1][name] = shape
        room -= num_bytes
    return buckets


def send(
    tensors: Iterator[tuple[str, Tensor]],
    buckets: Sequence[Bucket],
    group: dist.ProcessGroup | None,
) -> None:
    """Send a tensor stream, in the buckets' order, to all group ranks, which call `receive`.

    Without a group this rank only takes part in making the tensors.
    """
    for bucket in buckets:
        part = dict(islice(tensors, len(bucket)))
        assert list(part) == list(bucket), "the stream has the order of the parameter map"
        if group is not None:
            flat = [tensor.contiguous().view(-1) for tensor in part.values()]
            dist.broadcast(flat[0] if len(flat) == 1 else torch.cat(flat), 0, group)
            dist.broadcast(torch.cat([block_sums(tensor) for tensor in flat]), 0, group)
    assert next(tensors, None) is None, "the stream has tensors of another model"


def receive(
    buckets: Sequence[Bucket], dtype: torch.dtype, group: dist.ProcessGroup
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors from the group's first rank; a collective with `send`.

    Raises:
        ValueError: A checksum differs; raised before the bucket's first tensor.
    """
    for bucket in buckets:
        sizes = [prod(shape) for shape in bucket.values()]
        flat = torch.empty(sum(sizes), dtype=dtype, device=device.current_device())
        dist.broadcast(flat, 0, group)
        part = dict(zip(bucket, flat.split(sizes), strict=True))
        arrived = [block_sums(tensor) for tensor in part.values()]
        sent = torch.empty_like(torch.cat(arrived))
        dist.broadcast(sent, 0, group)
        if not torch.equal(torch.cat(arrived), sent):
            both = zip(bucket, arrived, sent.split([len(sums) for sums in arrived]), strict=True)
            names = ", ".join(name for name, a, b in both if not torch.equal(a, b))
            raise ValueError(
                "weights of the first training rank arrived changed, by the sums of their bits: "
                f"{names}; look for faults of memory and network between the two ranks"
            )
        yield from ((name, tensor.view(bucket[name])) for name, tensor in part.items())


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
