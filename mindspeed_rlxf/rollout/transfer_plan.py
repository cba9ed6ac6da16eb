"""Plan which slices of parameters the training ranks send to the generating ranks.

The plan is a pure function of the two layouts and the parameter map, so that every rank computes
the same plan by itself. Both layouts cut the same Hugging Face tensors (`shard_slices`); a move is
the overlap of a slice that a rollout rank needs and a slice that a training rank holds.
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
    chunks: int = 1  # of the model on a pipeline rank
    ep: int = 1  # data-parallel ranks that share the experts of a layer


@dataclass(frozen=True)
class Move:
    """Rows (dim 0) or columns (dim 1) that one rank sends to another; both count from 0."""

    sender: int
    receiver: int
    source: str  # the parameter's name at the sender
    target: str  # and at the receiver
    dim: int
    source_start: int
    target_start: int
    size: int
    width: int  # numbers of one row or column

    @property
    def numbers(self) -> int:
        return self.size * self.width


@dataclass(frozen=True)
class _Overlap:
    """The part of a needed shard that one tensor-parallel rank of the training holds."""

    tp_rank: int | None  # None = every tensor-parallel rank holds the part
    dim: int
    source_start: int
    target_start: int
    size: int
    width: int


def plan_moves(config: RunConfig) -> Iterator[Move]:
    """Plan all moves of a run whose pool is split into training and generating ranks."""
    actor = config.actor_rollout
    training = TrainingLayout(
        config.layout(Role.ACTOR_ROLLOUT), actor.model_chunks, actor.expert_model_parallel_size
    )
    return moves(actor.architecture, training, config.rollout_layout, config.rollout_ep)


def moves(
    architecture: ArchitectureConfig,
    training: TrainingLayout,
    rollout: ParallelLayout,
    rollout_ep: int = 1,
) -> Iterator[Move]:
    """Plan moves so that each rollout rank gets each of its elements once.

    Ordered by receiver and parameter. Of the replicas that hold a slice, the one with the fewest
    elements to send so far sends it.

    rollout_ep: replicas of the rollout that share the experts
    """
    holders = _holders(architecture, training)
    sent = [0] * training.ranks.world_size
    found: dict[tuple[str, int], list[_Overlap]] = {}
    for receiver in range(rollout.world_size):
        tp_rank, ep_rank = rollout.tp_rank(receiver), rollout.dp_rank(receiver) % rollout_ep
        for parameter in stage_parameters(
            architecture, Head.LANGUAGE_MODEL, ep_rank=ep_rank, ep=rollout_ep
        ):
            # Every layer and every expert is cut in the same way.
            key = re.sub(r"\.\d+\.", ".", parameter.name), tp_rank
            if key not in found:
                place = tp_rank, rollout.tp, training.ranks.tp
                found[key] = list(_overlaps(parameter, architecture, *place))
            name, ranks = holders[parameter.sources]
            senders: dict[int | None, int] = {}
            for part in found[key]:
                if part.tp_rank not in senders:
                    held = [r for r in ranks if part.tp_rank in (None, training.ranks.tp_rank(r))]
                    senders[part.tp_rank] = min(held, key=lambda rank: sent[rank])
                move = Move(
                    senders[part.tp_rank], receiver, name, parameter.name,
                    part.dim, part.source_start, part.target_start, part.size, part.width,
                )  # fmt: skip
                sent[move.sender] += move.numbers
                yield move


def _holders(
    architecture: ArchitectureConfig, training: TrainingLayout
) -> dict[tuple[str, ...], tuple[str, list[int]]]:
    """Map a parameter's Hugging Face names to its training name and the ranks that hold a shard.

    A tied output layer, which the last stage has as a copy of the embedding, is left out.
    """
    ranks, ep = training.ranks, training.ep
    found: dict[tuple[str, ...], tuple[str, list[int]]] = {}
    for pp_rank in range(ranks.pp):
        stage = [rank for rank in range(ranks.world_size) if ranks.pp_rank(rank) == pp_rank]
        for ep_rank in range(ep):
            place = pp_rank, ranks.pp, training.chunks, ep_rank, ep
            mine = [rank for rank in stage if ranks.dp_rank(rank) % ep == ep_rank]
            for p in rank_parameters(architecture, Head.LANGUAGE_MODEL, *place):
                found.setdefault(p.sources, (p.name, stage if p.expert is None else mine))
    return found


def _overlaps(
    parameter: StageParameter, a: ArchitectureConfig, tp_rank: int, tp: int, training_tp: int
) -> Iterator[_Overlap]:
    """Cut the shard of rollout rank `tp_rank` of `tp` into the pieces that training ranks hold."""
    needed = _place_slices(parameter, a, tp_rank, tp)
    if parameter.split is Split.REPLICATED:
        [(source, dim, _, stop, _)] = needed
        yield _Overlap(None, dim, 0, 0, stop, _width(source, dim, a))
        return
    for rank in range(training_tp):
        last: _Overlap | None = None
        held = _place_slices(parameter, a, rank, training_tp)
        for source, dim, start, stop, target in needed:
            for other, _, held_start, held_stop, place in held:
                first, end = max(start, held_start), min(stop, held_stop)
                if source != other or first >= end:
                    continue
                numbers = place + first - held_start, target + first - start, end - first
                piece = _Overlap(rank, dim, *numbers, _width(source, dim, a))
                whole = _join(last, piece) if last else None
                if last and not whole:
                    yield last
                last = whole or piece
        if last:
            yield last


def _place_slices(
    parameter: StageParameter, a: ArchitectureConfig, tp_rank: int, tp: int
) -> list[tuple[str, int, int, int, int]]:
    """Return (source, dim, start, stop, offset in the shard) of each slice of a shard."""
    placed, offset = [], 0
    for part in shard_slices(parameter, a, tp_rank, tp):
        placed.append((part.source, part.dim, part.start, part.stop, offset))
        offset += part.size
    return placed


def _width(source: str, dim: int, a: ArchitectureConfig) -> int:
    shape = hf_shape(source, a)
    return prod(shape) // shape[dim]


def _join(one: _Overlap, other: _Overlap) -> _Overlap | None:
    """Join two parts that are adjacent at the sender and at the receiver; None for others."""
    follows = (
        one.source_start + one.size == other.source_start
        and one.target_start + one.size == other.target_start
    )
    return replace(one, size=one.size + other.size) if follows else None


def make_buckets(planned: Iterable[Move], limit: int) -> list[list[Move]]:
    """Cut moves and gather them, in order, into buckets of at most `limit` numbers."""
    buckets: list[list[Move]] = []
    room = 0
    for move in (piece for whole in planned for piece in _cut(whole, limit)):
        if move.numbers > room:
            buckets.append([])
            room = limit
        buckets[-1].append(move)
        room -= move.numbers
    return buckets


def _cut(move: Move, limit: int) -> Iterator[Move]:
    """Cut a move into pieces of whole rows or columns, at least one each."""
    step = max(1, limit // move.width)
    for start in range(0, move.size, step):
        yield replace(
            move,
            source_start=move.source_start + start,
            target_start=move.target_start + start,
            size=min(step, move.size - start),
        )


def order_peers(rank: int, senders: int, receivers: int, sends: bool) -> list[int]:
    """Order the ranks of the other side so that ranks cannot deadlock.

    In turn k sender s meets receiver (s + k) % n. A rank waits only for ranks at an earlier turn,
    so the ranks at the earliest turn can always go on.
    """
    turns, there = max(senders, receivers), receivers if sends else senders
    found = ((rank + turn if sends else rank - turn) % turns for turn in range(turns))
    return [peer for peer in found if peer < there]
