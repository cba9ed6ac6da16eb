"""Samples of one forward on one rank: packed end to end, or padded to the longest.

Axes: rows = samples, tokens = all places of the micro-batch in the order of the flattened hidden
states ([s, b] flattened; packed: b = 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mindspeed_rlxf.data.batch import Rollouts
from mindspeed_rlxf.models.attention import Attend, PackedSequences


@dataclass(frozen=True)
class MicroBatch:
    rows: list[int]  # which rows of the rank's batch these are
    token_ids: Tensor  # [b, s] int64
    positions: Tensor  # [s] int64
    attend: Attend | None  # None = padded rows
    starts: Tensor  # [rows] flat place of each row's first token
    stride: int  # flat distance between neighbouring tokens of a row
    prompt_lengths: Tensor  # [rows]
    response_lengths: Tensor  # [rows]
    response_ids: Tensor  # [response tokens of all rows] int64

    def places(self, first: Tensor, count: Tensor) -> Tensor:
        """Flat places of `count[i]` tokens of row i from its token `first[i]` on, row after row."""
        row = torch.repeat_interleave(torch.arange(len(count)), count)
        step = torch.arange(int(count.sum())) - torch.repeat_interleave(
            count.cumsum(0) - count, count
        )
        return (self.starts[row] + (first[row] + step) * self.stride).to(self.token_ids.device)

    def prediction_places(self, count: Tensor) -> Tensor:
        """Where the model predicts response token t = 0 .. count - 1: one place before it."""
        return self.places(self.prompt_lengths - 1, count)

    def last_places(self) -> Tensor:
        """The last token of each row."""
        last = self.prompt_lengths + self.response_lengths - 1
        return self.places(last, torch.ones_like(last))


def make_micro_batches(
    rollouts: Rollouts,
    groups: Sequence[Sequence[int]],
    packed: bool,
    multiple_of: int,
    device: torch.device,
) -> list[MicroBatch]:
    """One micro-batch for each group of rows.

    multiple_of: the token axis is filled up to a multiple of it (sequence parallel splits it).
    """
    build = _packed if packed else _padded
    return [build(rollouts, list(rows), multiple_of, device) for rows in groups]


def _sequences(rollouts: Rollouts, rows: list[int]) -> list[Tensor]:
    sequences = []
    for row in rows:
        prompt = rollouts.prompt_ids[row, : int(rollouts.prompt_lengths[row])]
        response = rollouts.response_ids[row, : int(rollouts.response_lengths[row])]
        sequences.append(torch.cat((prompt, response)))
    return sequences


def _responses(rollouts: Rollouts, rows: list[int]) -> Tensor:
    ids, lengths = rollouts.response_ids, rollouts.response_lengths
    return torch.cat([ids[row, : int(lengths[row])] for row in rows])


def _fill(length: int, multiple_of: int) -> int:
    return -length % multiple_of


def _packed(
    rollouts: Rollouts, rows: list[int], multiple_of: int, device: torch.device
) -> MicroBatch:
    sequences = _sequences(rollouts, rows)
    lengths = torch.tensor([len(s) for s in sequences])
    fill = _fill(int(lengths.sum()), multiple_of)
    if fill:  # one more sequence that nobody reads
        sequences.append(torch.zeros(fill, dtype=torch.long))
    parts = tuple(len(s) for s in sequences)
    return MicroBatch(
        rows=rows,
        token_ids=torch.cat(sequences)[None, :].to(device),
        positions=torch.cat([torch.arange(n) for n in parts]).to(device),
        attend=PackedSequences(lengths=parts),
        starts=lengths.cumsum(0) - lengths,
        stride=1,
        prompt_lengths=rollouts.prompt_lengths[rows],
        response_lengths=rollouts.response_lengths[rows],
        response_ids=_responses(rollouts, rows).to(device),
    )


def _padded(
    rollouts: Rollouts, rows: list[int], multiple_of: int, device: torch.device
) -> MicroBatch:
    token_ids = pad_sequence(_sequences(rollouts, rows), batch_first=True)
    fill = _fill(token_ids.size(1), multiple_of)
    token_ids = torch.nn.functional.pad(token_ids, (0, fill))
    return MicroBatch(
        rows=rows,
        token_ids=token_ids.to(device),
        positions=torch.arange(token_ids.size(1)).to(device),
        attend=None,
        starts=torch.arange(len(rows)),
        stride=len(rows),
        prompt_lengths=rollouts.prompt_lengths[rows],
        response_lengths=rollouts.response_lengths[rows],
        response_ids=_responses(rollouts, rows).to(device),
    )


def scatter_rows(flat: Sequence[Tensor], counts: Sequence[Tensor], width: int) -> Tensor:
    """Flat values of several micro-batches -> [rows, width], 0 where a row has no value.

    flat[m]: values of micro-batch m, row after row; counts[m]: how many of them each row has.
    """
    values = torch.cat([f.cpu() for f in flat])
    count = torch.cat(list(counts))
    columns = torch.arange(width)[None, :] < count[:, None]
    out = torch.zeros(len(count), width, dtype=values.dtype)
    out[columns] = values
    return out
