"""Group rows into micro-batches. Groups are consecutive, so that results keep their order."""

from __future__ import annotations

from collections.abc import Sequence

Rows = Sequence[int]


def chunk_rows(rows: Rows, size: int) -> list[Rows]:
    """Divide rows into consecutive groups of `size`; the last one may be shorter."""
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def group_by_tokens(rows: Rows, lengths: Sequence[int], limit: int) -> list[Rows]:
    """Divide rows into consecutive groups of at most `limit` tokens; a longer row is alone.

    lengths: tokens of every row of the batch, looked up by row
    """
    groups, start, tokens = [], 0, 0
    for place, row in enumerate(rows):
        if place > start and tokens + lengths[row] > limit:
            groups.append(rows[start:place])
            start, tokens = place, 0
        tokens += lengths[row]
    return [*groups, rows[start:]] if len(rows) else []


def split_groups(groups: Sequence[Rows], count: int) -> list[Rows]:
    """Halve the group with most rows until there are `count`, or as many as rows."""
    result = list(groups)
    while len(result) < count:
        largest = max(range(len(result)), key=lambda i: len(result[i]))
        group = result[largest]
        if len(group) == 1:
            break
        half = len(group) // 2
        result[largest : largest + 1] = [group[:half], group[half:]]
    return result
