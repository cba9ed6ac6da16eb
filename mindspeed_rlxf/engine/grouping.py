"""Group rows into micro-batches: consecutive rows, or rows packed by their lengths."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
import torch.distributed as dist

from mindspeed_rlxf.config.schema import LearningConfig, RoleConfig

Rows = Sequence[int]


def group_rows(
    role: RoleConfig,
    rows: Rows,
    lengths: Sequence[int],
    in_order: bool,
    group: dist.ProcessGroup,
) -> list[Rows]:
    """Divide this rank's rows into micro-batches, equally many on every data-parallel rank.

    By `micro_batch_size`, or by tokens where `max_tokens_per_micro_batch` is set; then a collective
    over `group`. Groups are split so that their number is a multiple of `micro_batch_multiple`, as
    far as they have more than one row.

    lengths:  tokens of every row of the batch, indexed by row
    in_order: True = groups of consecutive rows also with `balance_by_length`, which would pack
              rows by tokens (`pack_by_tokens`)
    group:    the data-parallel ranks, for tensors on the CPU
    """
    limit = role.max_tokens_per_micro_batch
    if limit is None:
        groups = chunk_rows(rows, role.micro_batch_size)
        count = len(groups)
    else:
        packs = isinstance(role, LearningConfig) and role.balance_by_length and not in_order
        groups = (pack_by_tokens if packs else group_by_tokens)(rows, lengths, limit)
        largest = torch.tensor(len(groups))
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        count = int(largest)
    return split_groups(groups, count + -count % role.micro_batch_multiple)


def chunk_rows(rows: Rows, size: int) -> list[Rows]:
    """Divide rows into consecutive groups of `size`; the last one may be shorter."""
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def group_by_tokens(rows: Rows, lengths: Sequence[int], limit: int) -> list[Rows]:
    """Divide rows into consecutive groups of at most `limit` tokens; a longer row is alone."""
    groups, start, tokens = [], 0, 0
    for place, row in enumerate(rows):
        if place > start and tokens + lengths[row] > limit:
            groups.append(rows[start:place])
            start, tokens = place, 0
        tokens += lengths[row]
    return [*groups, rows[start:]] if len(rows) else []


def pack_by_tokens(rows: Rows, lengths: Sequence[int], limit: int) -> list[Rows]:
    """Divide rows into few groups of nearly equal token counts, at most `limit` tokens each.

    A row longer than the limit is alone. Rows of a group keep their order; groups are in the order
    of their first rows.

    lengths: tokens of every row of the batch, indexed by row

    Greedy: rows go, longest first, to the group with the fewest tokens. Where a group exceeds the
    limit, one group is added and all is repeated. The result never has more groups than
    `group_by_tokens` needs, and is its result where packing fails.
    """
    tokens, consecutive = [lengths[row] for row in rows], group_by_tokens(rows, lengths, limit)
    least = -(-sum(min(n, limit) for n in tokens) // limit)
    for count in range(max(1, least), len(consecutive) + 1):
        places = _group_longest_first(tokens, count)
        if all(len(group) == 1 or sum(tokens[p] for p in group) <= limit for group in places):
            return [[rows[place] for place in group] for group in sorted(map(sorted, places))]
    return consecutive


def _group_longest_first(tokens: Sequence[int], count: int) -> list[list[int]]:
    groups: list[list[int]] = [[] for _ in range(count)]
    shortest = [(0, number) for number in range(count)]
    for place in sorted(range(len(tokens)), key=lambda place: -tokens[place]):
        total, number = heapq.heappop(shortest)
        groups[number].append(place)
        heapq.heappush(shortest, (total + tokens[place], number))
    return [group for group in groups if group]


def split_groups(groups: Sequence[Rows], count: int) -> list[Rows]:
    """Return the groups after halving that of the most rows until there are `count` groups.

    Of equal groups the first is halved; the halves, the shorter one first, take its place.
    Stops earlier where every group has one row. More than `count` groups are returned unchanged.
    """
    result = list(groups)
    while len(result) < count:
        largest = max(range(len(result)), key=lambda i: len(result[i]))
        group = result[largest]
        if len(group) == 1:
            break
        half = len(group) // 2
        result[largest : largest + 1] = [group[:half], group[half:]]
    return result
