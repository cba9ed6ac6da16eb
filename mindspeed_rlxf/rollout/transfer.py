"""Send trained weights to the ranks that only generate, as Hugging Face tensors in buckets.

The first training rank broadcasts each bucket, then its tensors' checksums: exact sums over their
bit patterns as integers, in blocks. Both sides know names and shapes from the
architecture, so nothing else is sent.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import prod
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rlxf import device
from mindspeed_rlxf.rollout.bit_sums import block_sums

T = TypeVar("T")
BUCKET_BYTES = 256 * 1024**2  # of one bucket; a larger tensor has a bucket of its own

Bucket = dict[str, tuple[int, ...]]
"""Names and shapes of the tensors that are sent together."""


def in_buckets(items: Iterable[T], count_bytes: Callable[[T], int]) -> Iterator[list[T]]:
    """Split items, in order, into buckets with at most BUCKET_BYTES or one item."""
    bucket, room = list[T](), BUCKET_BYTES
    for item in items:
        num_bytes = count_bytes(item)
        if bucket and num_bytes > room:
            yield bucket
            bucket, room = [], BUCKET_BYTES
        bucket.append(item)
        room -= num_bytes
    if bucket:
        yield bucket


def make_buckets(shapes: Mapping[str, tuple[int, ...]], itemsize: int) -> list[Bucket]:
    """Put tensors, in order, into buckets."""
    return [dict(each) for each in in_buckets(shapes.items(), lambda i: prod(i[1]) * itemsize)]


def send(
    tensors: Iterator[tuple[str, Tensor]],
    buckets: Sequence[Bucket],
    group: dist.ProcessGroup | None,
) -> None:
    """Send a tensor stream, in the buckets' order, to all group ranks, which call `receive`.

    Without a group this rank only takes part in making the tensors.
    """
    for bucket in buckets:
        in_bucket = dict(islice(tensors, len(bucket)))
        assert list(in_bucket) == list(bucket), "the stream has the order of the parameter map"
        if group is not None:
            flat = [tensor.contiguous().view(-1) for tensor in in_bucket.values()]
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
        in_bucket = dict(zip(bucket, flat.split(sizes), strict=True))
        arrived = [block_sums(tensor) for tensor in in_bucket.values()]
        sent = torch.empty_like(torch.cat(arrived))
        dist.broadcast(sent, 0, group)
        if not torch.equal(torch.cat(arrived), sent):
            both = zip(bucket, arrived, sent.split([len(sums) for sums in arrived]), strict=True)
            names = ", ".join(name for name, a, b in both if not torch.equal(a, b))
            raise ValueError(
                "weights of the first training rank arrived changed, by the sums of their bits: "
                f"{names}; look for faults of memory and network between the two ranks"
            )
        yield from ((name, tensor.view(bucket[name])) for name, tensor in in_bucket.items())
