"""Plan which slices of parameters the training ranks send to the generating ranks.

The plan is a pure function of the two layouts and the parameter map, so that every rank computes
the same plan by itself. Both layouts cut the same Hugging Face tensors (`shard_slices`); a move is
the overlap of a slice that a rollout rank needs and a slice that a training rank has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.layout import ParallelLayout
from mindspeed_rlxf.config.schema import ArchitectureConfig, RunConfig
from mindspeed_rlxf.models.parameters import (
    Head,
    Split,
    StageParameter,
    hf_shape,
    rank_parameters,
    shard_slices,
    stage_parameters,
)


@dataclass(frozen=True)
class TrainingLayout:
    """The layout of the ranks that train."""

    ranks: ParallelLayout
    chunks: int = 1  # chunks of the model on a pipeline rank
    ep: int = 1  # expert-parallel size


@dataclass(frozen=True)
class Move:
    """Rows (dim 0) or columns (dim 1) of a parameter that one rank sends to another."""

    sender: int  # counted from 0 among the ranks that train
    receiver: int  # counted from 0 among the ranks that generate
    source: str  # the parameter's name at the sender
    target: str  # the parameter's name at the receiver
    dim: int
    source_start: int
    target_start: int
    size: int  # rows or columns
    width: int  # elements of one row or column

    @property
    def numbers(self) -> int:
        """Elements that are sent."""
        return self.size * self.width


@dataclass(frozen=True)
class _Overlap:
    """The rows or columns of a needed shard that one tensor-parallel rank of the training has."""

    tp_rank: int | None  # None = every tensor-parallel rank has them
    dim: int
    source_start: int
    target_start: int
    size: int
    width: int


def plan_moves(config: RunConfig) -> Iterator[Move]:
    """Yield all moves of a run whose pool is split into training and generating ranks."""
    actor = config.actor_rollout
    training = TrainingLayout(
        config.layout(Role.ACTOR_ROLLOUT), actor.model_chunks, actor.expert_model_parallel_size
    )
    return plan_layout_moves(actor.architecture, training, config.rollout_layout, config.rollout_ep)


def plan_layout_moves(
    architecture: ArchitectureConfig,
    training: TrainingLayout,
    rollout: ParallelLayout,
    rollout_ep: int = 1,
) -> Iterator[Move]:
    """Yield moves by which each rollout rank gets each element of its parameters once.

    Ordered by receiver, then by parameter. Of the training ranks that have a slice, the one with
    the fewest elements to send so far sends it.

    rollout_ep: expert-parallel size of the ranks that generate
    """
    holders = _find_holders(architecture, training)
    sent = [0] * training.ranks.world_size
    overlaps: dict[tuple[str, int], list[_Overlap]] = {}
    for receiver in range(rollout.world_size):
        tp_rank, ep_rank = rollout.tp_rank(receiver), rollout.dp_rank(receiver) % rollout_ep
        for parameter in stage_parameters(
            architecture, Head.LANGUAGE_MODEL, ep_rank=ep_rank, ep=rollout_ep
        ):
            # Every layer and every expert is cut in the same way.
            key = re.sub(r"\.\d+\.", ".", parameter.name), tp_rank
            if key not in overlaps:
                sizes = rollout.tp, training.ranks.tp
                overlaps[key] = list(_find_overlaps(parameter, architecture, tp_rank, *sizes))
            name, ranks = holders[parameter.sources]
            senders: dict[int | None, int] = {}
            for part in overlaps[key]:
                if part.tp_rank not in senders:
                    able = [r for r in ranks if part.tp_rank in (None, training.ranks.tp_rank(r))]
                    senders[part.tp_rank] = min(able, key=lambda rank: sent[rank])
                move = Move(
                    senders[part.tp_rank], receiver, name, parameter.name,
                    part.dim, part.source_start, part.target_start, part.size, part.width,
                )  # fmt: skip
                sent[move.sender] += move.numbers
                yield move


def _find_holders(
    architecture: ArchitectureConfig, training: TrainingLayout
) -> dict[tuple[str, ...], tuple[str, list[int]]]:
    """Map a parameter's Hugging Face names to its training name and the ranks that have a shard."""
    ranks, ep = training.ranks, training.ep
    holders: dict[tuple[str, ...], tuple[str, list[int]]] = {}
    for pp_rank in range(ranks.pp):
        stage = [rank for rank in range(ranks.world_size) if ranks.pp_rank(rank) == pp_rank]
        for ep_rank in range(ep):
            position = pp_rank, ranks.pp, training.chunks, ep_rank, ep
            sharing = [rank for rank in stage if ranks.dp_rank(rank) % ep == ep_rank]
            for p in rank_parameters(architecture, Head.LANGUAGE_MODEL, *position):
                holders.setdefault(p.sources, (p.name, stage if p.expert is None else sharing))
    return holders


def _find_overlaps(
    parameter: StageParameter, a: ArchitectureConfig, tp_rank: int, tp: int, training_tp: int
) -> Iterator[_Overlap]:
    """Yield the overlaps of a rollout rank's shard with the shards of all training ranks."""
    needed = _find_slices(parameter, a, tp_rank, tp)
    if parameter.split is Split.REPLICATED:
        [(source, dim, _, stop, _)] = needed
        yield _Overlap(None, dim, 0, 0, stop, _elements_per_index(source, dim, a))
        return
    for rank in range(training_tp):
        last: _Overlap | None = None
        held = _find_slices(parameter, a, rank, training_tp)
        for source, dim, start, stop, offset in needed:
            for other, _, held_start, held_stop, held_offset in held:
                first, end = max(start, held_start), min(stop, held_stop)
                if source != other or first >= end:
                    continue
                numbers = held_offset + first - held_start, offset + first - start, end - first
                piece = _Overlap(rank, dim, *numbers, _elements_per_index(source, dim, a))
                if last and (last.source_start + last.size, last.target_start + last.size) == (
                    piece.source_start,
                    piece.target_start,
                ):
                    piece = replace(last, size=last.size + piece.size)
                elif last:
                    yield last
                last = piece
        if last:
            yield last


def _find_slices(
    parameter: StageParameter, a: ArchitectureConfig, tp_rank: int, tp: int
) -> list[tuple[str, int, int, int, int]]:
    slices, offset = [], 0
    for part in shard_slices(parameter, a, tp_rank, tp):
        slices.append((part.source, part.dim, part.start, part.stop, offset))
        offset += part.size
    return slices


def _elements_per_index(source: str, dim: int, a: ArchitectureConfig) -> int:
    shape = hf_shape(source, a)
    return prod(shape) // shape[dim]


def make_buckets(planned: Iterable[Move], limit: int) -> list[list[Move]]:
    """Put moves, in order, into buckets of at most `limit` elements; cut moves that are larger.

    A single row or column over the limit makes a bucket of its own.
    """
    buckets: list[list[Move]] = []
    room = 0
    for whole in planned:
        step = max(1, limit // whole.width)
        for start in range(0, whole.size, step):
            move = replace(
                whole,
                source_start=whole.source_start + start,
                target_start=whole.target_start + start,
                size=min(step, whole.size - start),
            )
            if move.numbers > room:
                buckets.append([])
                room = limit
            buckets[-1].append(move)
            room -= move.numbers
    return buckets


def order_peers(rank: int, senders: int, receivers: int, sends: bool) -> list[int]:
    """Return the ranks of the other side in an order in which exchanges cannot deadlock.

    In turn k sender s meets receiver (s + k) % n, n = the larger side. A rank waits only for ranks
    at an earlier turn, so the ranks at the earliest turn can always go on.

    rank:               of this side; on each side ranks count from 0
    senders, receivers: number of ranks on each side
    sends:              whether this side sends
    """
    turns, num_peers = max(senders, receivers), receivers if sends else senders
    met = ((rank + turn if sends else rank - turn) % turns for turn in range(turns))
    return [peer for peer in met if peer < num_peers]
