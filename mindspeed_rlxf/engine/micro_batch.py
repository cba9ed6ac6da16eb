"""Group rows into micro-batches: samples for one forward pass, packed end to end or padded.

Axes: rows = samples, tokens = all micro-batch positions in flattened hidden-state order ([s, b]
flattened; packed: b = 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby, pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mindspeed_rlxf.config.schema import ArchitectureConfig, LearningConfig, RoleConfig
from mindspeed_rlxf.data.batch import Rollouts
from mindspeed_rlxf.data.mini_batches import fill_cheapest, sample_flops
from mindspeed_rlxf.device.copies import upload
from mindspeed_rlxf.engine.flop_counter import Work

if TYPE_CHECKING:
    from mindspeed_rlxf.models.attention import Attend

Rows = Sequence[int]


@dataclass(frozen=True)
class MicroBatch:
    """Inputs for one forward pass, and the token positions in its hidden states."""

    rows: list[int]  # indices of the rows in the rank's batch
    token_ids: Tensor  # [b, s] int64
    positions: Tensor  # [s] int64, or [b, s] if rows differ
    lengths: tuple[int, ...] | None  # of the packed sequences, in order; None = padded rows
    prompts: tuple[int | None, ...]  # per sequence the one that has its prompt, None = itself
    starts: Tensor  # [rows] flat index of the first token of each row's prompt
    response_starts: Tensor  # [rows] flat index of the first token of each row's response
    stride: int  # flat distance between neighbouring tokens of a row
    prompt_lengths: Tensor  # [rows]
    response_lengths: Tensor  # [rows]
    trained_mask: Tensor  # [rows, response] bool, True = token that is trained
    trained_ids: Tensor  # [trained tokens of all rows] int64
    cp: dist.ProcessGroup | None = None  # ranks that share the tokens; None = this rank has all

    @cached_property
    def attend(self) -> Attend | None:
        """Attention of the packed sequences for Megatron's layers; None = padded rows."""
        from mindspeed_rlxf.models.attention import AcrossRanks, PackedSequences, SharedPrompts

        if self.lengths is None:
            return None
        attend: Attend = PackedSequences(lengths=self.lengths)
        if any(prompt is not None for prompt in self.prompts):
            attend = SharedPrompts(lengths=self.lengths, prompts=self.prompts)
        return attend if self.cp is None else AcrossRanks(whole=attend, group=self.cp)

    @property
    def own_token_ids(self) -> Tensor:
        """This rank's token ids, [b, s / cp]."""
        return self._own(self.token_ids)

    @property
    def own_positions(self) -> Tensor:
        """This rank's positions, [s / cp] or [b, s / cp]."""
        return self._own(self.positions)

    def _own(self, tensor: Tensor) -> Tensor:
        return tensor if self.cp is None else tensor.chunk(self.cp.size(), -1)[self.cp.rank()]

    def prediction_places(self, slots: Tensor) -> Tensor:
        """Return the flat index of the hidden state one token before each marked slot.

        That state predicts the slot's token. Shape [marked slots], row after row, on the host.

        Args:
            slots: [rows, slots] bool, True for marked slots. Slot t is response token t's position;
                the last one may lie behind the response.
        """
        row, slot = slots.nonzero(as_tuple=True)
        return self._flat_places(row, self.prompt_lengths[row] - 1 + slot)

    def last_places(self) -> Tensor:
        """Return the flat index of each row's last token, [rows], on the host."""
        last_tokens = self.prompt_lengths + self.response_lengths - 1
        return self._flat_places(torch.arange(len(last_tokens)), last_tokens)

    def _flat_places(self, row: Tensor, token: Tensor) -> Tensor:
        response_token = token - self.prompt_lengths[row]
        in_prompt = self.starts[row] + token * self.stride
        in_response = self.response_starts[row] + response_token * self.stride
        return torch.where(response_token < 0, in_prompt, in_response)

    def work(self, a: ArchitectureConfig, reads_logits: bool) -> Work:
        """Return the work in a forward pass; value and reward models read no logits."""
        tokens = 0
        flops = 0
        previous_start = None
        rows = zip(
            self.starts.tolist(),
            self.prompt_lengths.tolist(),
            self.response_lengths.tolist(),
            strict=True,
        )
        for start, prompt, response in rows:
            tokens += prompt + response
            flops += sample_flops(a, prompt + response, response if reads_logits else 0)
            if start == previous_start:  # its prompt is that of the row before
                tokens -= prompt
                flops -= sample_flops(a, prompt, 0)
            previous_start = start
        return Work(tokens, flops)


def make_micro_batches(
    rollouts: Rollouts,
    groups: Sequence[Sequence[int]],
    packed: bool,
    multiple_of: int,
    device: torch.device,
    numbers: Sequence[int] | None = None,
    cp: dist.ProcessGroup | None = None,
) -> list[MicroBatch]:
    """Make one micro-batch per row group.

    Rows lie end to end if `packed`, else are padded to the longest row. The token axis is padded to
    a multiple of `multiple_of`, because sequence parallelism and the ranks of `cp` split it. With
    `numbers` (from `number_prompts`) neighbouring rows share an equal prompt, which needs packed
    rows.
    """
    prompt_lengths = rollouts.prompt_lengths.tolist()
    response_lengths = rollouts.response_lengths.tolist()
    batches = []
    for rows in map(list, groups):
        sequences = []
        for row in rows:
            prompt = rollouts.prompt_ids[row, : prompt_lengths[row]]
            response = rollouts.response_ids[row, : response_lengths[row]]
            sequences.append(torch.cat((prompt, response)))
        prompts = [prompt_lengths[row] for row in rows]
        if packed:
            prompt_numbers = [numbers[row] for row in rows] if numbers else rows
            layout = _pack_rows(prompt_numbers, sequences, prompts, multiple_of, device)
        else:
            layout = _pad_rows(sequences, prompts, multiple_of, device)
        trained = rollouts.trained_mask[rows]
        batches.append(
            MicroBatch(
                rows=rows,
                **layout,
                prompt_lengths=rollouts.prompt_lengths[rows],
                response_lengths=rollouts.response_lengths[rows],
                trained_mask=trained,
                trained_ids=upload(rollouts.response_ids[rows][trained], device),
                cp=cp,
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
    starts: list[int] = []
    response_starts: list[int] = []
    num_tokens = 0
    for _, run in groupby(range(len(rows)), key=numbers.__getitem__):
        sharing = list(run)  # rows with one prompt
        prompt_length = prompts[sharing[0]]
        starts += [num_tokens] * len(sharing)
        if len(sharing) == 1:
            row = rows[sharing[0]]
            response_starts.append(num_tokens + prompt_length)
            sequences.append(row)
            prompt_of.append(None)
            num_tokens += len(row)
            continue
        prompt_number = len(sequences)
        sequences.append(rows[sharing[0]][:prompt_length])
        prompt_of.append(None)
        num_tokens += prompt_length
        for i in sharing:
            response = rows[i][prompt_length:]
            response_starts.append(num_tokens)
            sequences.append(response)
            prompt_of.append(prompt_number)
            num_tokens += len(response)
    num_fill = -num_tokens % multiple_of
    if num_fill > 0:  # one more sequence, which is never read
        sequences.append(torch.zeros(num_fill, dtype=torch.long))
        prompt_of.append(None)
    lengths = tuple(len(sequence) for sequence in sequences)
    positions = []
    for length, number in zip(lengths, prompt_of, strict=True):
        first_position = 0 if number is None else lengths[number]
        positions.append(torch.arange(first_position, first_position + length))
    return {
        "token_ids": upload(torch.cat(sequences)[None, :], device),
        "positions": upload(torch.cat(positions), device),
        "lengths": lengths,
        "prompts": tuple(prompt_of),
        "starts": torch.tensor(starts),
        "response_starts": torch.tensor(response_starts),
        "stride": 1,
    }


def _pad_rows(
    rows: list[Tensor], prompts: list[int], multiple_of: int, device: torch.device
) -> dict[str, Any]:
    count = len(rows)
    token_ids = pad_sequence(rows, batch_first=True)
    token_ids = torch.nn.functional.pad(token_ids, (0, -token_ids.size(1) % multiple_of))
    return {
        "token_ids": upload(token_ids, device),
        "positions": upload(torch.arange(token_ids.size(1)), device),
        "lengths": None,
        "prompts": (),
        "starts": torch.arange(count),
        "response_starts": torch.arange(count) + count * torch.tensor(prompts),
        "stride": count,
    }


def number_prompts(rollouts: Rollouts) -> list[int]:
    """Return each row's prompt number, equal for equal token ids.

    A row without a response has its own number.
    """
    numbers: dict[Any, int] = {}  # by token ids, or by row
    prompt_lengths = rollouts.prompt_lengths.tolist()
    response_lengths = rollouts.response_lengths.tolist()
    number_of_row = []
    for row, prompt_ids in enumerate(rollouts.prompt_ids):
        key: Any = row
        if response_lengths[row]:
            key = prompt_ids[: prompt_lengths[row]].numpy().tobytes()
        number_of_row.append(numbers.setdefault(key, len(numbers)))
    return number_of_row


def bring_together(rows: Rows, prompts: Sequence[int]) -> Rows:
    """Return the rows with equal prompts next to each other, otherwise in their order."""
    first_index: dict[int, int] = {}
    for i, row in enumerate(rows):
        first_index.setdefault(prompts[row], i)
    return sorted(rows, key=lambda row: first_index[prompts[row]])


def saved_tokens(rows: Rows, prompts: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Return `saved` for `group_rows`; `lengths` has the prompt tokens of each row in the batch."""
    saved = [0]
    for previous, row in pairwise(rows):
        saved.append(lengths[row] if prompts[row] == prompts[previous] else 0)
    return saved


def group_rows(
    role: RoleConfig,
    rows: Rows,
    lengths: Sequence[int],
    in_order: bool,
    group: dist.ProcessGroup,
    saved: Sequence[int] | None = None,
    padded: bool = False,
) -> list[Rows]:
    """Divide this rank's rows into micro-batches, equally many on every data-parallel rank.

    Groups by `micro_batch_size`, or by tokens if `max_tokens_per_micro_batch` is set; the latter is
    a collective over `group`. Splits groups with more than one row until their number is a multiple
    of `micro_batch_multiple`.

    Args:
        role: Role configuration.
        rows: This rank's row indices.
        lengths: Tokens of every row in the batch, indexed by row.
        in_order: Whether groups have consecutive rows even with `balance_by_length`, which would
            pack rows by tokens (`pack_by_tokens`).
        group: Data-parallel ranks, for CPU tensors.
        saved: For each of `rows`, the tokens saved behind the previous row by sharing its prompt; 0
            for different prompts. None shares no prompt.
        padded: Whether rows of a micro-batch are padded to its longest one, and not packed. Padding
            counts as tokens, and rows are sorted by length first unless `in_order`.
    """
    limit = role.max_tokens_per_micro_batch
    if limit is None:
        groups = chunk_rows(rows, role.micro_batch_size)
        count = len(groups)
    else:
        packs = isinstance(role, LearningConfig) and role.balance_by_length and not in_order
        if padded:
            longest_first = sorted(rows, key=lambda row: -lengths[row])
            groups = group_padded(rows if in_order else longest_first, lengths, limit)
        elif packs:
            groups = pack_by_tokens(rows, lengths, limit, saved)
        else:
            groups = group_by_tokens(rows, lengths, limit, saved)
        largest = torch.tensor(len(groups))
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        count = int(largest)
    return split_groups(groups, count + -count % role.micro_batch_multiple)


def chunk_rows(rows: Rows, size: int) -> list[Rows]:
    """Divide rows into consecutive groups with `size` rows; the last one may be shorter."""
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def group_by_tokens(
    rows: Rows, lengths: Sequence[int], limit: int, saved: Sequence[int] | None = None
) -> list[Rows]:
    """Divide rows into consecutive groups up to `limit` tokens; a longer row is alone.

    `saved`: see `group_rows`.
    """
    groups, start, tokens = [], 0, 0
    for place, row in enumerate(rows):
        more = lengths[row] - (saved[place] if saved and place > start else 0)
        if place > start and tokens + more > limit:
            groups.append(rows[start:place])
            start, tokens, more = place, 0, lengths[row]
        tokens += more
    return [*groups, rows[start:]] if len(rows) else []


def group_padded(rows: Rows, lengths: Sequence[int], limit: int) -> list[Rows]:
    """Divide rows into consecutive groups up to `limit` tokens, counted with padding.

    A group has as many tokens as its longest row, times its rows. A longer row is alone.
    """
    groups: list[Rows] = []
    start, longest = 0, 0
    for place, row in enumerate(rows):
        longest = max(longest, lengths[row])
        if place > start and (place + 1 - start) * longest > limit:
            groups.append(rows[start:place])
            start, longest = place, lengths[row]
    return [*groups, rows[start:]] if len(rows) else []


def pack_by_tokens(
    rows: Rows, lengths: Sequence[int], limit: int, saved: Sequence[int] | None = None
) -> list[Rows]:
    """Divide rows into few groups with nearly equal token counts, at most `limit` tokens each.

    A row longer than the limit is alone. Rows sharing a prompt stay together up to the limit. Rows
    keep their order within a group; groups are ordered by their first rows. Rows go, longest first,
    to the group with the fewest tokens. While a group exceeds the limit, everything is repeated
    with one more group, up to the number that `group_by_tokens` needs, whose result is then
    returned.
    """
    consecutive = group_by_tokens(rows, lengths, limit, saved)
    runs: list[list[int]] = []  # rows that share a prompt, or one row
    tokens: list[int] = []  # of each run
    for i, row in enumerate(rows):
        num_saved = saved[i] if saved else 0
        if num_saved and tokens[-1] + lengths[row] - num_saved <= limit:
            runs[-1].append(row)
            tokens[-1] += lengths[row] - num_saved
        else:
            runs.append([row])
            tokens.append(lengths[row])
    fewest = -(-sum(min(n, limit) for n in tokens) // limit)
    for count in range(max(1, fewest), len(consecutive) + 1):
        filled = fill_cheapest(tokens, count, partition_size=len(tokens))
        groups = [sorted(group) for group in filled if group]  # indices of runs
        if all(len(group) == 1 or sum(tokens[i] for i in group) <= limit for group in groups):
            return [list(chain.from_iterable(runs[i] for i in group)) for group in sorted(groups)]
    return consecutive


def split_groups(groups: Sequence[Rows], count: int) -> list[Rows]:
    """Return the groups after halving the one with the most rows until there are `count` groups.

    Among equal groups, halves the first; the halves, the shorter one first, take its place. Stops
    earlier if every group has one row. Returns more than `count` groups unchanged.
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
