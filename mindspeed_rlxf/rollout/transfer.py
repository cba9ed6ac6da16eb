"""Move trained weights to the generating ranks, in buckets that are checked by sums.

A bucket has the parameters bit by bit as they are trained. With it the sender sends, for each slice
in it, the exact sum of the slice's bit patterns as integers. The receiver compares this with the
sum over its own parameters after the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mindspeed_rlxf import device
from mindspeed_rlxf.rollout.transfer_plan import Move, make_buckets, order_peers

BUCKET_BYTES = 256 * 1024**2  # of memory beside the weights of a rank
SUMMED_AT_ONCE = 16 * 1024**2  # numbers of a slice, of which a copy in fp32 is made
EXACT = 512  # patterns of 16 bits whose sum is exact in fp32, in any order: 2^9 x 2^15 = 2^24

Buckets = list[list[Move]]
Operation = Callable[..., Any]


class _Side:
    """The buckets of one rank, by the rank of the other side, in the order of transfer."""

    sends: bool

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        planned: Iterable[Move],
        group: dist.ProcessGroup,
        num_senders: int,
    ) -> None:
        """planned: the moves of all ranks; group: the senders' ranks, then the receivers'."""
        self.tensors, self.group, self.num_senders = tensors, group, num_senders
        sends, mine = self.sends, group.rank() - (0 if self.sends else num_senders)
        sample = next(iter(tensors.values()))
        self.dtype = sample.dtype
        by_peer: dict[int, list[Move]] = {}
        for move in planned:
            own, peer = (move.sender, move.receiver) if sends else (move.receiver, move.sender)
            if own == mine:
                by_peer.setdefault(peer, []).append(move)
        limit = BUCKET_BYTES // sample.element_size()
        order = order_peers(mine, num_senders, group.size() - num_senders, sends)
        self.buckets: dict[int, Buckets] = {
            peer: make_buckets(by_peer[peer], limit) for peer in order if peer in by_peer
        }

    def _begin(self, numbers: int) -> None:
        """Check on all ranks of both sides that their plans agree.

        numbers: count to be sent, minus count to be received
        """
        total = torch.tensor([numbers], dtype=torch.int64, device=device.current_device())
        dist.all_reduce(total, group=self.group)
        assert int(total) == 0, f"{int(total)} numbers more are sent than received"

    def _numbers(self) -> int:
        planned = (move for found in self.buckets.values() for bucket in found for move in bucket)
        return sum(move.numbers for move in planned)

    def _empty(self, bucket: Sequence[Move]) -> tuple[Tensor, Tensor]:
        """Allocate a bucket and its sums."""
        numbers, where = sum(move.numbers for move in bucket), device.current_device()
        return (
            torch.empty(numbers, dtype=self.dtype, device=where),
            torch.empty(len(bucket), dtype=torch.int64, device=where),
        )

    def _exchange(self, operation: Operation, tensors: Sequence[Tensor], rank: int) -> None:
        """Send or receive tensors, and wait until they have arrived."""
        pieces = [dist.P2POp(operation, tensor, rank, self.group) for tensor in tensors]
        for work in dist.batch_isend_irecv(pieces):
            work.wait()


class WeightSender(_Side):
    """A rank that trains."""

    sends = True

    @torch.no_grad()
    def send(self) -> None:
        """Send the present weights; every rollout rank must call `receive` at the same time."""
        self._begin(self._numbers())
        for receiver, buckets in self.buckets.items():
            for bucket in buckets:
                self._exchange(dist.isend, self._pack(bucket), self.num_senders + receiver)

    def _pack(self, bucket: Sequence[Move]) -> tuple[Tensor, Tensor]:
        """Copy the moves of a bucket into one flat tensor; return it and the sum of each move."""
        flat, sums = self._empty(bucket)
        found = []
        for move, part in zip(bucket, _parts(flat, bucket), strict=True):
            piece = self.tensors[move.source].narrow(move.dim, move.source_start, move.size)
            part.copy_(piece.reshape(-1))
            found.append(bit_sum(piece))
        return flat, sums.copy_(torch.tensor(found))


class WeightReceiver(_Side):
    """A rank that generates."""

    sends = False

    @torch.no_grad()
    def receive(self) -> None:
        """Receive all parameters. After WeightsDiffer they are not valid."""
        self._begin(-self._numbers())
        for sender, buckets in self.buckets.items():
            for bucket in buckets:
                flat, sums = self._empty(bucket)
                self._exchange(dist.irecv, (flat, sums), sender)
                self._unpack(bucket, flat, sums, sender)

    def _unpack(self, bucket: Sequence[Move], flat: Tensor, sums: Tensor, sender: int) -> None:
        """Copy a received bucket into the parameters.

        Raises WeightsDiffer where a sum differs.
        """
        names = []
        for move, part, expected in zip(bucket, _parts(flat, bucket), sums.tolist(), strict=True):
            piece = self.tensors[move.target].narrow(move.dim, move.target_start, move.size)
            piece.copy_(part.view(piece.shape))
            if bit_sum(piece) != expected:
                names.append(move.target)
        if names:
            raise WeightsDiffer(sender, self.group.rank(), names)


class WeightsDiffer(ValueError):
    """Received weights are not those that were sent."""

    def __init__(self, sender: int, receiver: int, names: Sequence[str]) -> None:
        super().__init__(
            f"weights that rank {sender} sent arrived changed at rank {receiver} of the pool, by "
            f"the sums of their bits: {', '.join(dict.fromkeys(names))}; look for faults of memory "
            "and network between the two"
        )


def bit_sum(tensor: Tensor) -> int:
    """Sum the elements' bit patterns, read as signed 16-bit integers; parts of wider elements are
    weighted by their place.

    A change of one element always changes the sum. Not every device sums integers in 64 bits, and
    on an NPU fp64 is fp32. So the device sums a few patterns at a time in fp32, which is exact, and
    the host adds up these sums.
    """
    patterns = tensor.detach().reshape(-1, 1).view(torch.int16)
    total = 0
    for place in range(patterns.size(1)):
        for part in patterns[:, place].split(SUMMED_AT_ONCE):
            whole = F.pad(part.float(), (0, -part.numel() % EXACT)).unflatten(0, (-1, EXACT))
            total += int(whole.sum(dim=-1).cpu().double().sum()) << 16 * place
    return total


def _parts(flat: Tensor, bucket: Sequence[Move]) -> Sequence[Tensor]:
    return flat.split([move.numbers for move in bucket])
