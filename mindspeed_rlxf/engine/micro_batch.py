"""Group rows into micro-batches: samples of one forward, packed end to end or padded.

Axes: rows = samples, tokens = all positions of the micro-batch in the order of the flattened hidden
states ([s, b] flattened; packed: b = 1).
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mindspeed_rlxf.config.schema import LearningConfig, RoleConfig
from mindspeed_rlxf.data.batch import Rollouts
from mindspeed_rlxf.models.attention import Attend, PackedSequences


@dataclass(frozen=True)
class MicroBatch:
    """The inputs of one forward pass, and where its tokens are in the hidden states."""

    rows: list[int]  # indices of the rows in the rank's batch
    token_ids: Tensor  # [b, s] int64
    positions: Tensor  # [s] int64
    attend: Attend | None  # None = padded rows
    starts: Tensor  # [rows] flat index of each row's first token
    stride: int  # flat distance between neighbouring tokens of a row
    prompt_lengths: Tensor  # [rows]
    response_lengths: Tensor  # [rows]
    trained_mask: Tensor  # [rows, response] bool, True = token that is learnt from
    trained_ids: Tensor  # [trained tokens of all rows] int64

    def prediction_places(self, slots: Tensor) -> Tensor:
        """Return the flat index of the hidden state one token before each marked slot.

        That state predicts the slot's token. The result is [marked slots], row after row.
        slots: [rows, slots] bool, True = marked; slot t is the position of response token t, the
               last one may be behind the response
        """
        row, slot = slots.nonzero(as_tuple=True)
        return self._flat_places(row, self.prompt_lengths[row] - 1 + slot)

    def last_places(self) -> Tensor:
        """Return the flat index of the last token of each row, [rows]."""
        last = self.prompt_lengths + self.response_lengths - 1
        return self._flat_places(torch.arange(len(last)), last)

    def _flat_places(self, row: Tensor, token: Tensor) -> Tensor:
        return (self.starts[row] + token * self.stride).to(self.token_ids.device)


def make_micro_batches(
    rollouts: Rollouts,
    groups: Sequence[Sequence[int]],
    packed: bool,
    multiple_of: int,
    device: torch.device,
) -> list[MicroBatch]:
    """Make one micro-batch for each group of rows.

    packed:      True = rows end to end; False = padded to the longest row
    multiple_of: the token axis is padded to a multiple of it, as sequence parallel splits this axis
    """
    build = _pack_rows if packed else _pad_rows
    prompts, responses = rollouts.prompt_lengths.tolist(), rollouts.response_lengths.tolist()
    batches = []
    for rows in map(list, groups):
        sequences = [
            torch.cat(
                (rollouts.prompt_ids[i, : prompts[i]], rollouts.response_ids[i, : responses[i]])
            )
            for i in rows
        ]
        trained = rollouts.trained_mask[rows]
        batches.append(
            MicroBatch(
                rows=rows,
                **build(sequences, multiple_of, device),
                prompt_lengths=rollouts.prompt_lengths[rows],
                response_lengths=rollouts.response_lengths[rows],
                trained_mask=trained,
                trained_ids=rollouts.response_ids[rows][trained].to(device),
            )
        )
    return batches


def _pack_rows(sequences: list[Tensor], multiple_of: int, device: torch.device) -> dict[str, Any]:
    lengths = torch.tensor([len(s) for s in sequences])
    fill = -int(lengths.sum()) % multiple_of
    if fill:  # one more sequence, which is never read
        sequences.append(torch.zeros(fill, dtype=torch.long))
    parts = tuple(len(s) for s in sequences)
    return {
        "token_ids": torch.cat(sequences)[None, :].to(device),
        "positions": torch.cat([torch.arange(n) for n in parts]).to(device),
        "attend": PackedSequences(lengths=parts),
        "starts": lengths.cumsum(0) - lengths,
        "stride": 1,
    }


def _pad_rows(sequences: list[Tensor], multiple_of: int, device: torch.device) -> dict[str, Any]:
    token_ids = pad_sequence(sequences, batch_first=True)
    token_ids = torch.nn.functional.pad(token_ids, (0, -token_ids.size(1) % multiple_of))
    return {
        "token_ids": token_ids.to(device),
        "positions": torch.arange(token_ids.size(1)).to(device),
        "attend": None,
        "starts": torch.arange(len(sequences)),
        "stride": len(sequences),
    }


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
    of their first rows. Rows go, longest first, to the group with the fewest tokens; while a group
    exceeds the limit, all is repeated with one more group, up to the number that `group_by_tokens`
    needs, whose result is then returned.
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
