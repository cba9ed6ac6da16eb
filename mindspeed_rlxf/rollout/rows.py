"""Samples in a generation: the host's record for each, and the row states on the device.

The host reads the drawn tokens only on request (`RowStates.read_progress`), so that it can launch
several decode steps without waiting for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mindspeed_rlxf.rollout.rollout_engine import (
    Begun,
    FinishReason,
    GenerationRequest,
    GenerationResult,
)
from mindspeed_rlxf.rollout.sampling import SamplingSettings, uniform_numbers


class GrowingSample:
    """One sample during its generation, as the host knows it.

    Attributes:
        number: Position among all samples added to the generation.
        sampling: The settings without limit and stop strings; samples with equal ones draw their
            next tokens in one call.
        key: The prompt's token ids as bytes; equal prompts have equal keys.
        tokens: The response as far as copied from the device: when the sample leaves the batch, and
            with stop strings at every read. It begins with the request's part.
        log_probs: Copied when the sample leaves the batch.
    """

    def __init__(self, request: GenerationRequest, number: int = 0) -> None:
        """Make a request's sample, with the response that has begun, if any."""
        self.request, self.number, self.settings = request, number, request.settings
        # 0 if the turns before this one are in the prompt
        self.turn_start = request.turn_start if request.begun is not None else 0
        self.sampling = replace(request.settings, max_new_tokens=0, stop=None)
        self.key = request.prompt.tobytes()
        self._begun = request.begun or Begun([], [], [])
        self.tokens: list[int] = list(self._begun.tokens)
        self.log_probs: list[float] = list(self._begun.log_probs)

    @property
    def num_drawn(self) -> int:
        """Number of copied tokens behind the request's part."""
        return len(self.tokens) - len(self._begun.tokens)

    @property
    def has_ended(self) -> bool:
        """Whether the copied tokens are a whole response, or a whole turn."""
        is_longest = len(self.tokens) >= self.settings.max_new_tokens
        return is_longest or self.settings.ends_with(self._turn)

    @property
    def prefill_ids(self) -> np.ndarray:
        """Input for a prefill: the prompt, then the copied response; [tokens] int64."""
        return np.concatenate((self.request.prompt, np.asarray(self.tokens, dtype=np.int64)))

    def append_until_end(self, tokens: Sequence[int]) -> bool:
        """Append tokens to the response up to the first that ends it; return whether one does."""
        for token in tokens:
            self.tokens.append(token)
            if self.settings.ends_with(self._turn):
                return True
        return False

    @property
    def _turn(self) -> list[int]:
        """The copied tokens of this turn."""
        return self.tokens[self.turn_start :] if self.turn_start else self.tokens

    def make_result(self, weights_version: int) -> GenerationResult:
        """Make the result once the response has ended; its new tokens have this version."""
        reason = FinishReason.of(self._turn, self.settings)
        place = self.request.place
        versions = self._versions(weights_version)
        return GenerationResult(
            place, self.tokens, self.log_probs, reason, weights_version, versions
        )

    def make_request(self, weights_version: int) -> GenerationRequest:
        """Return the request for the rest of the response; its new tokens have this version."""
        if not self.tokens:
            return self.request
        begun = Begun(self.tokens, self.log_probs, self._versions(weights_version))
        return replace(self.request, begun=begun)

    def _versions(self, weights_version: int) -> list[int]:
        return self._begun.versions + [weights_version] * self.num_drawn


@dataclass(frozen=True)
class RowGroup:
    """Rows with the same sampling settings.

    Attributes:
        rows: [count] int64, indices among the grouped rows, or a slice with all.
        ends: [count] int64, EOS ids; None = no token ends a response.
    """

    settings: SamplingSettings
    rows: Tensor | slice
    ends: Tensor | None


class RowStates:
    """Tokens, log-probs and progress for each row, on the device. Row i is row i of the KV cache.

    Axes: rows = most rows, width = most tokens in a response.

    A row that has ended is still decoded until the host reads the progress. Its surplus tokens land
    behind its response, and nothing reads them.
    """

    def __init__(self, max_rows: int, width: int, device: torch.device) -> None:
        """Allocate zeros for `width` response tokens in each row.

        One more column takes what is appended to full rows.
        """
        self.width = width
        self.device = device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.tokens = zeros(max_rows, width + 1)
        self.log_probs = zeros(max_rows, width + 1, dtype=torch.float32)
        self.uniforms = zeros(max_rows, width + 1, dtype=torch.float32)
        self.last = zeros(max_rows)  # last token, the input of the next decode step
        self.position = zeros(max_rows)  # position of the last token in prompt and response
        self.count = zeros(max_rows)  # tokens of the response
        self.limit = zeros(max_rows)  # most tokens of the response
        self.turn_start = zeros(max_rows)  # tokens of the response before its turn
        self.is_active = zeros(max_rows)  # 1 = goes on, 0 = has ended
        self._ends: dict[tuple[int, ...], Tensor] = {}  # EOS ids; decode graphs keep the addresses

    def set_up(self, first: int, rows: Sequence[GrowingSample]) -> None:
        """Set the rows from `first` on, which are to be prefilled.

        Copies their responses so far. Sampling rows get random numbers for a whole response, the
        others zeros.
        """
        shape = (len(rows), self.width + 1)
        cache_rows = slice(first, first + len(rows))
        uniforms, log_probs = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        tokens, numbers = np.zeros(shape, np.int64), []
        for i, row in enumerate(rows):
            request, count, limit = row.request, len(row.tokens), row.settings.max_new_tokens
            if row.settings.do_sample:
                uniforms[i, :limit] = uniform_numbers(request.seed, request.sample_id, limit)
            tokens[i, :count], log_probs[i, :count] = row.tokens, row.log_probs[:count]
            numbers.append((len(request.prompt) + count - 1, count, limit, row.turn_start, 1))
        self.uniforms[cache_rows] = torch.from_numpy(uniforms).to(self.device)
        self.log_probs[cache_rows] = torch.from_numpy(log_probs).to(self.device)
        self.tokens[cache_rows] = torch.from_numpy(tokens).to(self.device)
        columns = torch.tensor(numbers).to(self.device).unbind(1)
        self.position[cache_rows], self.count[cache_rows], self.limit[cache_rows] = columns[:3]
        self.turn_start[cache_rows], self.is_active[cache_rows] = columns[3:]

    def group_by_settings(self, rows: Sequence[GrowingSample]) -> list[RowGroup]:
        """Group rows whose `sampling` is equal, ordered by each group's first row."""
        indices: dict[SamplingSettings, list[int]] = {}
        for i, row in enumerate(rows):
            indices.setdefault(row.sampling, []).append(i)
        return [
            RowGroup(
                settings,
                torch.tensor(group).to(self.device) if len(indices) > 1 else slice(None),
                self._find_ends(settings.eos_token_ids),
            )
            for settings, group in indices.items()
        ]

    def _find_ends(self, eos_token_ids: tuple[int, ...]) -> Tensor | None:
        """Return the EOS ids on the device, the same tensor in each call; None for none."""
        if not eos_token_ids:
            return None
        if eos_token_ids not in self._ends:
            self._ends[eos_token_ids] = torch.tensor(eos_token_ids).to(self.device)
        return self._ends[eos_token_ids]

    def set_padding(self, padding: slice) -> None:
        """Make these rows, which no sample has, ended ones that a decode step may compute."""
        self.position[padding] = 0
        self.is_active[padding] = 0

    def next_uniforms(self, cache_rows: slice) -> tuple[Tensor, Tensor]:
        """Return each row's random number for its next token, and its turn's tokens.

        [rows] fp32 and [rows] int64, on the device.
        """
        count = self.count[cache_rows]
        uniforms = self.uniforms[cache_rows].gather(1, count[:, None]).squeeze(1)
        return uniforms, count - self.turn_start[cache_rows]

    def append(
        self, tokens: Tensor, log_probs: Tensor, cache_rows: slice, groups: Sequence[RowGroup]
    ) -> None:
        """Append a token to each of these rows that has not ended.

        A row ends with an EOS from its group, or at its limit. Does not wait for the device.
        """
        count, is_active = self.count[cache_rows], self.is_active[cache_rows]
        self.tokens[cache_rows].scatter_(1, count[:, None], tokens[:, None])
        self.log_probs[cache_rows].scatter_(1, count[:, None], log_probs[:, None])
        self.last[cache_rows] = tokens
        count += is_active
        self.position[cache_rows] += is_active
        is_active *= count < self.limit[cache_rows]
        for group in groups:
            if group.ends is not None:
                is_active[group.rows] *= (tokens[group.rows][:, None] != group.ends).all(-1)

    def read_progress(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Wait for the device, and copy the first `rows` rows' progress to the host.

        Returns:
            Each response's tokens [rows] int64, and [rows] bool, True = has not ended.
        """
        count, is_active = torch.stack((self.count[:rows], self.is_active[:rows])).cpu().numpy()
        return count, is_active > 0

    def read(self, cache_rows: Sequence[int], most: int) -> tuple[Tensor, Tensor]:
        """Wait for the device; return the rows' tokens and log-probs, [rows, most] each."""
        at = torch.tensor(cache_rows).to(self.device)
        return self.tokens[at, :most].cpu(), self.log_probs[at, :most].cpu()

    def read_new(
        self, cache_rows: Sequence[int], first: np.ndarray, last: np.ndarray
    ) -> list[list[int]]:
        """Wait for the device; return each row's response tokens from `first` up to `last`.

        Copies as many columns of each row as the longest of these parts has.
        """
        widths = last - first
        at, start = torch.from_numpy(np.stack((cache_rows, first))).to(self.device)
        columns = start[:, None] + torch.arange(int(widths.max()), device=self.device)
        tokens = self.tokens[at[:, None], columns.clamp(max=self.width)].tolist()
        return [row[:width] for row, width in zip(tokens, widths.tolist(), strict=True)]

    def copy_rows(self, source: Tensor, target: Tensor) -> None:
        """Copy the states from rows `source` to rows `target`, overwriting them."""
        for state in (self.tokens, self.log_probs, self.uniforms, self.last, self.position,
                      self.count, self.limit, self.turn_start, self.is_active):  # fmt: skip
            state[target] = state[source]
