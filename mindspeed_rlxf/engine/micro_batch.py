"""Samples of one forward on one rank: packed end to end, or padded to the longest.

Axes: rows = samples, tokens = all positions of the micro-batch in the order of the flattened hidden
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
    return [build(rollouts, list(rows), multiple_of, device) for rows in groups]


def _sequences(rollouts: Rollouts, rows: list[int]) -> list[Tensor]:
    prompts, responses = rollouts.prompt_lengths.tolist(), rollouts.response_lengths.tolist()
    return [
        torch.cat(
            (rollouts.prompt_ids[row, : prompts[row]], rollouts.response_ids[row, : responses[row]])
        )
        for row in rows
    ]


def _lengths_and_targets(
    rollouts: Rollouts, rows: list[int], device: torch.device
) -> dict[str, Tensor]:
    trained = rollouts.trained_mask[rows]
    return {
        "prompt_lengths": rollouts.prompt_lengths[rows],
        "response_lengths": rollouts.response_lengths[rows],
        "trained_mask": trained,
        "trained_ids": rollouts.response_ids[rows][trained].to(device),
    }


def _pack_rows(
    rollouts: Rollouts, rows: list[int], multiple_of: int, device: torch.device
) -> MicroBatch:
    sequences = _sequences(rollouts, rows)
    lengths = torch.tensor([len(s) for s in sequences])
    fill = -int(lengths.sum()) % multiple_of
    if fill:  # one more sequence, which is never read
        sequences.append(torch.zeros(fill, dtype=torch.long))
    parts = tuple(len(s) for s in sequences)
    return MicroBatch(
        rows=rows,
        token_ids=torch.cat(sequences)[None, :].to(device),
        positions=torch.cat([torch.arange(n) for n in parts]).to(device),
        attend=PackedSequences(lengths=parts),
        starts=lengths.cumsum(0) - lengths,
        stride=1,
        **_lengths_and_targets(rollouts, rows, device),
    )


def _pad_rows(
    rollouts: Rollouts, rows: list[int], multiple_of: int, device: torch.device
) -> MicroBatch:
    token_ids = pad_sequence(_sequences(rollouts, rows), batch_first=True)
    fill = -token_ids.size(1) % multiple_of
    token_ids = torch.nn.functional.pad(token_ids, (0, fill))
    return MicroBatch(
        rows=rows,
        token_ids=token_ids.to(device),
        positions=torch.arange(token_ids.size(1)).to(device),
        attend=None,
        starts=torch.arange(len(rows)),
        stride=len(rows),
        **_lengths_and_targets(rollouts, rows, device),
    )
