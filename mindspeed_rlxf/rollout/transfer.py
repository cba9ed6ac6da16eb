"""Send trained weights to the generating ranks, in buckets with checksums.

A bucket has slices of parameters, bit by bit as they are trained. With the bucket goes a checksum
of each slice: the exact sum of its bit patterns as integers. The receiver compares it with the
checksum of its own parameter after the copy.
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

BUCKET_BYTES = 256 * 1024**2  # largest bucket, which a rank allocates beside its weights
SUMMED_AT_ONCE = 16 * 1024**2  # elements of a slice that are copied to fp32 at a time
EXACT = 512  # patterns of 16 bits whose sum is exact in fp32, in any order: 2^9 x 2^15 = 2^24

Buckets = list[list[Move]]
Operation = Callable[..., Any]


class _TransferSide:
    """What one rank sends or receives.

    sends:   True = this rank trains, False = it generates
    buckets: peer -> its buckets, in the order of transfer. A peer is counted from 0 among the ranks
             that generate (for a sender) or train (for a receiver)
    """

    sends: bool

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        planned: Iterable[Move],
        group: dist.ProcessGroup,
        num_senders: int,
    ) -> None:
        """Put this rank's moves into buckets of at most BUCKET_BYTES, by peer (`order_peers`).

        tensors: this rank's parameters, by name
        planned: the moves of all ranks
        group:   the ranks that train, then those that generate
        """
        self.tensors, self.group, self.num_senders = tensors, group, num_senders
        sends, own_rank = self.sends, group.rank() - (0 if self.sends else num_senders)
        sample = next(iter(tensors.values()))
        self.dtype = sample.dtype
        by_peer: dict[int, list[Move]] = {}
        for move in planned:
            rank, peer = (move.sender, move.receiver) if sends else (move.receiver, move.sender)
            if rank == own_rank:
                by_peer.setdefault(peer, []).append(move)
        limit = BUCKET_BYTES // sample.element_size()
        order = order_peers(own_rank, num_senders, group.size() - num_senders, sends)
        self.buckets: dict[int, Buckets] = {
            peer: make_buckets(by_peer[peer], limit) for peer in order if peer in by_peer
        }

    def _check_totals(self) -> None:
        """Check that all ranks together send as many elements as they receive; a collective."""
        moves = (move for each in self.buckets.values() for bucket in each for move in bucket)
        numbers = sum(move.numbers for move in moves) * (1 if self.sends else -1)
        total = torch.tensor([numbers], dtype=torch.int64, device=device.current_device())
        dist.all_reduce(total, group=self.group)
        assert int(total) == 0, f"{int(total)} numbers more are sent than received"

    def _allocate_bucket(self, bucket: Sequence[Move]) -> tuple[Tensor, Tensor]:
        numbers, where = sum(move.numbers for move in bucket), device.current_device()
        return (
            torch.empty(numbers, dtype=self.dtype, device=where),
            torch.empty(len(bucket), dtype=torch.int64, device=where),
        )

    def _exchange_tensors(self, operation: Operation, tensors: Sequence[Tensor], rank: int) -> None:
        operations = [dist.P2POp(operation, tensor, rank, self.group) for tensor in tensors]
        for work in dist.batch_isend_irecv(operations):
            work.wait()


class WeightSender(_TransferSide):
    """Sends the weights of a rank that trains."""

    sends = True

    @torch.no_grad()
    def send(self) -> None:
        """Send the present weights, bucket after bucket, to the ranks that generate.

        A collective: all training ranks call `send` while all rollout ranks call `receive`. Raises
        AssertionError, before sending, if together they would not receive as much as is sent.
        """
        self._check_totals()
        for receiver, buckets in self.buckets.items():
            for bucket in buckets:
                self._exchange_tensors(
                    dist.isend, self._pack_bucket(bucket), self.num_senders + receiver
                )

    def _pack_bucket(self, bucket: Sequence[Move]) -> tuple[Tensor, Tensor]:
        flat, sums = self._allocate_bucket(bucket)
        checksums = []
        for move, part in zip(bucket, _split_by_move(flat, bucket), strict=True):
            piece = self.tensors[move.source].narrow(move.dim, move.source_start, move.size)
            part.copy_(piece.reshape(-1))
            checksums.append(bit_sum(piece))
        return flat, sums.copy_(torch.tensor(checksums))


class WeightReceiver(_TransferSide):
    """Receives the weights on a rank that generates."""

    sends = False

    @torch.no_grad()
    def receive(self) -> None:
        """Receive all parameters, in place; a collective with `WeightSender.send`.

        Raises WeightsDiffer after the first bucket with a checksum that differs; the parameters are
        then not valid. Raises AssertionError as `send`.
        """
        self._check_totals()
        for sender, buckets in self.buckets.items():
            for bucket in buckets:
                flat, sums = self._allocate_bucket(bucket)
                self._exchange_tensors(dist.irecv, (flat, sums), sender)
                self._unpack_bucket(bucket, flat, sums, sender)

    def _unpack_bucket(
        self, bucket: Sequence[Move], flat: Tensor, sums: Tensor, sender: int
    ) -> None:
        """Copy a received bucket into the parameters."""
        names = []
        for move, part, expected in zip(
            bucket, _split_by_move(flat, bucket), sums.tolist(), strict=True
        ):
            piece = self.tensors[move.target].narrow(move.dim, move.target_start, move.size)
            piece.copy_(part.view(piece.shape))
            if bit_sum(piece) != expected:
                names.append(move.target)
        if names:
            raise WeightsDiffer(sender, self.group.rank(), names)


class WeightsDiffer(ValueError):
    """Received weights are not those that were sent. names: of the changed parameters"""

    def __init__(self, sender: int, receiver: int, names: Sequence[str]) -> None:
        super().__init__(
            f"weights that rank {sender} sent arrived changed at rank {receiver} of the pool, by "
            f"the sums of their bits: {', '.join(dict.fromkeys(names))}; look for faults of memory "
            "and network between the two"
        )


def bit_sum(tensor: Tensor) -> int:
    """Return a checksum: the sum of the elements' bit patterns as integers. Waits for the device.

    Each 16 bits of an element are a signed integer; the k-th 16 bits count 2^(16 k) times. A change
    of one element always changes the sum.

    Not every device sums integers in 64 bits, and on an NPU fp64 is fp32. So the device sums a few
    patterns at a time in fp32, which is exact, and the host adds up these sums.
    """
    patterns = tensor.detach().reshape(-1, 1).view(torch.int16)
    total = 0
    for k in range(patterns.size(1)):
        for part in patterns[:, k].split(SUMMED_AT_ONCE):
            whole = F.pad(part.float(), (0, -part.numel() % EXACT)).unflatten(0, (-1, EXACT))
            total += int(whole.sum(dim=-1).cpu().double().sum()) << 16 * k
    return total


def _split_by_move(flat: Tensor, bucket: Sequence[Move]) -> Sequence[Tensor]:
    return flat.split([move.numbers for move in bucket])
