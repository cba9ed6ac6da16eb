"""Group rows into micro-batches: samples of one forward, packed end to end or padded.

Axes: rows = samples, tokens = all positions of the micro-batch in the order of the flattened hidden
states ([s, b] flattened; packed: b = 1).
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mindspeed_rlxf.config.schema import ArchitectureConfig, LearningConfig, RoleConfig
from mindspeed_rlxf.data.batch import Rollouts
from mindspeed_rlxf.data.mini_batches import sample_flops
from mindspeed_rlxf.engine.work import Work
from mindspeed_rlxf.models.attention import Attend, PackedSequences, SharedPrompts

Rows = Sequence[int]


@dataclass(frozen=True)
class MicroBatch:
    """The inputs of one forward pass, and where its tokens are in the hidden states."""

    rows: list[int]  # indices of the rows in the rank's batch
    token_ids: Tensor  # [b, s] int64
    positions: Tensor  # [s] int64
    attend: Attend | None  # None = padded rows
    starts: Tensor  # [rows] flat index of the first token of each row's prompt
    response_starts: Tensor  # [rows] flat index of the first token of each row's response
    stride: int  # flat distance between neighbouring tokens of a row
    prompt_lengths: Tensor  # [rows]
    response_lengths: Tensor  # [rows]
    trained_mask: Tensor  # [rows, response] bool, True = token that is trained
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
        response = token - self.prompt_lengths[row]
        own = self.response_starts[row] + response * self.stride
        flat = torch.where(response < 0, self.starts[row] + token * self.stride, own)
        return flat.to(self.token_ids.device)

    def work(self, a: ArchitectureConfig, reads_logits: bool) -> Work:
        """Return what a forward pass computes. reads_logits: False = a value or reward model"""
        tokens = flops = 0
        starts, before = self.starts.tolist(), None
        lengths = zip(self.prompt_lengths.tolist(), self.response_lengths.tolist(), strict=True)
        for start, (prompt, response) in zip(starts, lengths, strict=True):
            tokens += prompt + response
            flops += sample_flops(a, prompt + response, response if reads_logits else 0)
            if start == before:  # its prompt is that of the row before
                tokens -= prompt
                flops -= sample_flops(a, prompt, 0)
            before = start
        return Work(tokens, flops)


def make_micro_batches(
    rollouts: Rollouts,
    groups: Sequence[Sequence[int]],
    packed: bool,
    multiple_of: int,
    device: torch.device,
    numbers: Sequence[int] | None = None,
) -> list[MicroBatch]:
    """Make one micro-batch for each group of rows.

    packed:      True = rows end to end; False = padded to the longest row
    multiple_of: the token axis is padded to a multiple of it, as sequence parallel splits this axis
    numbers:     `number_prompts` of the batch if neighbouring rows of one prompt share it, which
                 needs packed rows; None = each row has its own
    """
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
        lengths, of = [prompts[i] for i in rows], [numbers[i] if numbers else i for i in rows]
        build = partial(_pack_rows, of) if packed else _pad_rows
        batches.append(
            MicroBatch(
                rows=rows,
                **build(sequences, lengths, multiple_of, device),
                prompt_lengths=rollouts.prompt_lengths[rows],
                response_lengths=rollouts.response_lengths[rows],
                trained_mask=trained,
                trained_ids=rollouts.response_ids[rows][trained].to(device),
            )
        )
    return batches


def _pack_rows(
    numbers: list[int],
    rows: list[Tensor],
    prompts: list[int],
    multiple_of: int,
    device: torch.device,
) -> dict[str, Any]:
    sequences: list[Tensor] = []
    prompt_of: list[int | None] = []  # number of the sequence that has a response's prompt
    end, starts, response_starts = 0, [], []
    for _, run in groupby(range(len(rows)), key=numbers.__getitem__):
        shared = list(run)
        prompt, first = prompts[shared[0]], len(sequences)
        starts += [end] * len(shared)
        if len(shared) == 1:
            response_starts.append(end + prompt)
            sequences.append(rows[shared[0]])
            prompt_of.append(None)
        else:
            ends = accumulate((len(rows[i]) - prompt for i in shared), initial=end + prompt)
            response_starts += list(ends)[:-1]
            sequences += [rows[shared[0]][:prompt], *(rows[i][prompt:] for i in shared)]
            prompt_of += [None, *[first] * len(shared)]
        end += sum(map(len, sequences[first:]))
    if fill := -end % multiple_of:  # one more sequence, which is never read
        sequences.append(torch.zeros(fill, dtype=torch.long))
        prompt_of.append(None)
    lengths = tuple(len(s) for s in sequences)
    begins = [0 if of is None else lengths[of] for of in prompt_of]
    positions = [torch.arange(b, b + n) for b, n in zip(begins, lengths, strict=True)]
    return {
        "token_ids": torch.cat(sequences)[None, :].to(device),
        "positions": torch.cat(positions).to(device),
        "attend": SharedPrompts(lengths=lengths, prompts=tuple(prompt_of))
        if any(begins)
        else PackedSequences(lengths=lengths),
        "starts": torch.tensor(starts),
        "response_starts": torch.tensor(response_starts),
        "stride": 1,
    }


def _pad_rows(
    rows: list[Tensor], prompts: list[int], multiple_of: int, device: torch.device
) -> dict[str, Any]:
    token_ids, count = pad_sequence(rows, batch_first=True), len(rows)
    token_ids = torch.nn.functional.pad(token_ids, (0, -token_ids.size(1) % multiple_of))
    return {
        "token_ids": token_ids.to(device),
        "positions": torch.arange(token_ids.size(1)).to(device),
        "attend": None,
        "starts": torch.arange(count),
        "response_starts": torch.arange(count) + count * torch.tensor(prompts),
        "stride": count,
    }


def number_prompts(rollouts: Rollouts) -> list[int]:
    """Return a number for the prompt of each row, the same for equal token ids.

    A row without a response has a number of its own.
    """
    numbers: dict[Any, int] = {}
    lengths = rollouts.prompt_lengths.tolist(), rollouts.response_lengths.tolist()
    rows = zip(rollouts.prompt_ids, *lengths, strict=True)
    keys = [ids[:n].numpy().tobytes() if m else i for i, (ids, n, m) in enumerate(rows)]
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def bring_together(rows: Rows, prompts: Sequence[int]) -> Rows:
    """Return the rows with those of one prompt next to each other, else in their order."""
    first: dict[int, int] = {}
    for place, row in enumerate(rows):
        first.setdefault(prompts[row], place)
    return sorted(rows, key=lambda row: first[prompts[row]])


def saved_tokens(rows: Rows, prompts: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Return `saved` of `group_rows`. lengths: tokens of each prompt of the batch"""
    same = [prompts[a] == prompts[b] for a, b in pairwise(rows)]
    return [0, *(lengths[row] * equal for row, equal in zip(rows[1:], same, strict=True))]


def group_rows(
    role: RoleConfig,
    rows: Rows,
    lengths: Sequence[int],
    in_order: bool,
    group: dist.ProcessGroup,
    saved: Sequence[int] | None = None,
) -> list[Rows]:
    """Divide this rank's rows into micro-batches, equally many on every data-parallel rank.

    By `micro_batch_size`, or by tokens where `max_tokens_per_micro_batch` is set; then a collective
    over `group`. Groups are split so that their number is a multiple of `micro_batch_multiple`, as
    far as they have more than one row.

    lengths:  tokens of every row of the batch, indexed by row
    in_order: True = groups of consecutive rows also with `balance_by_length`, which would pack
              rows by tokens (`pack_by_tokens`)
    group:    the data-parallel ranks, for tensors on the CPU
    saved:    for each of `rows` the tokens that it has less behind the row before it, whose prompt
              it shares; 0 = the prompts differ. None = no prompt is shared
    """
    limit = role.max_tokens_per_micro_batch
    if limit is None:
        groups = chunk_rows(rows, role.micro_batch_size)
        count = len(groups)
    else:
        packs = isinstance(role, LearningConfig) and role.balance_by_length and not in_order
        groups = (pack_by_tokens if packs else group_by_tokens)(rows, lengths, limit, saved)
        largest = torch.tensor(len(groups))
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        count = int(largest)
    return split_groups(groups, count + -count % role.micro_batch_multiple)


def chunk_rows(rows: Rows, size: int) -> list[Rows]:
    """Divide rows into consecutive groups of `size`; the last one may be shorter."""
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def group_by_tokens(
    rows: Rows, lengths: Sequence[int], limit: int, saved: Sequence[int] | None = None
) -> list[Rows]:
    """Divide rows into consecutive groups of at most `limit` tokens; a longer row is alone.

    saved: see `group_rows`
    """
    groups, start, tokens = [], 0, 0
    for place, row in enumerate(rows):
        more = lengths[row] - (saved[place] if saved and place > start else 0)
        if place > start and tokens + more > limit:
            groups.append(rows[start:place])
            start, tokens, more = place, 0, lengths[row]
        tokens += more
    return [*groups, rows[start:]] if len(rows) else []


def pack_by_tokens(
    rows: Rows, lengths: Sequence[int], limit: int, saved: Sequence[int] | None = None
) -> list[Rows]:
    """Divide rows into few groups of nearly equal token counts, at most `limit` tokens each.

    A row longer than the limit is alone. Rows of one prompt stay together up to the limit. Rows of
    a group keep their order; groups are in the order of their first rows. Rows go, longest first,
    to the group with the fewest tokens; while a group exceeds the limit, all is repeated with one
    more group, up to the number that `group_by_tokens` needs, whose result is then returned.
    saved: see `group_rows`
    """
    consecutive = group_by_tokens(rows, lengths, limit, saved)
    pieces, tokens = [[row] for row in rows], [lengths[row] for row in rows]
    if saved:
        pieces, tokens = [], []
        for place, row in enumerate(rows):
            if saved[place] and tokens[-1] + lengths[row] - saved[place] <= limit:
                pieces[-1].append(row)
                tokens[-1] += lengths[row] - saved[place]
            else:
                pieces.append([row])
                tokens.append(lengths[row])
    least = -(-sum(min(n, limit) for n in tokens) // limit)
    for count in range(max(1, least), len(consecutive) + 1):
        places = _group_longest_first(tokens, count)
        if all(len(group) == 1 or sum(tokens[p] for p in group) <= limit for group in places):
            return [
                [row for place in group for row in pieces[place]]
                for group in sorted(map(sorted, places))
            ]
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
