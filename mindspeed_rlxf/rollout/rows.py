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
    def prefill_ids(self) -> np.ndarray:
        """Input for a prefill: the prompt, then the copied response; [tokens] int64."""
        return np.concatenate((self.request.prompt, np.asarray(self.tokens, dtype=np.int64)))

    def append_until_end(self, tokens: Sequence[int]) -> bool:
        """Append tokens to the response up to the first that ends it; return whether one does."""
        for token in tokens:
            self.tokens.append(token)
            if self.settings.ends_with(self.tokens[self.turn_start :]):
                return True
        return False

    def make_result(self, weights_version: int) -> GenerationResult:
        """Make the result once the response has ended; its new tokens have this version."""
        reason = FinishReason.of(self.tokens[self.turn_start :], self.settings)
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
        num_new = len(self.tokens) - len(self._begun.tokens)
        return self._begun.versions + [weights_version] * num_new


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
    """Tokens, log-probs and progress for each row, on the device. Row i is cache slot i.

    Axes: slots = most rows, width = most tokens in a response.

    A row that has ended is still decoded until the host reads the progress. Its surplus tokens land
    behind its response, and nothing reads them.
    """

    def __init__(self, slots: int, width: int, where: torch.device) -> None:
        """Allocate zeros for `width` response tokens in each slot.

        One more column takes what is appended to full rows.
        """
        self.width, self.where = width, where

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=where)

        self.tokens = zeros(slots, width + 1)
        self.log_probs = zeros(slots, width + 1, dtype=torch.float32)
        self.uniforms = zeros(slots, width + 1, dtype=torch.float32)
        self.last = zeros(slots)  # last token, the input of the next decode step
        self.position = zeros(slots)  # position of the last token in prompt and response
        self.count = zeros(slots)  # tokens of the response
        self.limit = zeros(slots)  # most tokens of the response
        self.turn_start = zeros(slots)  # tokens of the response before its turn
        self.going = zeros(slots)  # 1 = goes on, 0 = has ended

    def set_up(self, first: int, rows: Sequence[GrowingSample]) -> None:
        """Set the slots from `first` for rows to be prefilled.

        Copies their responses so far. Sampling rows get random numbers for a whole response, the
        others zeros.
        """
        shape, slots = (len(rows), self.width + 1), slice(first, first + len(rows))
        uniforms, log_probs = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        tokens, numbers = np.zeros(shape, np.int64), []
        for i, row in enumerate(rows):
            request, count, limit = row.request, len(row.tokens), row.settings.max_new_tokens
            if row.settings.do_sample:
                uniforms[i, :limit] = uniform_numbers(request.seed, request.sample_id, limit)
            tokens[i, :count], log_probs[i, :count] = row.tokens, row.log_probs[:count]
            numbers.append((len(request.prompt) + count - 1, count, limit, row.turn_start, 1))
        self.uniforms[slots] = torch.from_numpy(uniforms).to(self.where)
        self.log_probs[slots] = torch.from_numpy(log_probs).to(self.where)
        self.tokens[slots] = torch.from_numpy(tokens).to(self.where)
        columns = torch.tensor(numbers).to(self.where).unbind(1)
        self.position[slots], self.count[slots], self.limit[slots] = columns[:3]
        self.turn_start[slots], self.going[slots] = columns[3:]

    def group_by_settings(self, rows: Sequence[GrowingSample]) -> list[RowGroup]:
        """Group rows whose `sampling` is equal, ordered by each group's first row."""
        indices: dict[SamplingSettings, list[int]] = {}
        for i, row in enumerate(rows):
            indices.setdefault(row.sampling, []).append(i)
        return [
            RowGroup(
                settings,
                torch.tensor(group).to(self.where) if len(indices) > 1 else slice(None),
                torch.tensor(settings.eos_token_ids).to(self.where)
                if settings.eos_token_ids
                else None,
            )
            for settings, group in indices.items()
        ]

    def next_uniforms(self, slots: slice) -> tuple[Tensor, Tensor]:
        """Return each row's random number for its next token, and its turn's tokens.

        [rows] fp32 and [rows] int64, on the device.
        """
        count = self.count[slots]
        uniforms = self.uniforms[slots].gather(1, count[:, None]).squeeze(1)
        return uniforms, count - self.turn_start[slots]

    def append(
        self, tokens: Tensor, log_probs: Tensor, slots: slice, groups: Sequence[RowGroup]
    ) -> None:
        """Append a token to each row in these slots that has not ended.

        A row ends with an EOS from its group, or at its limit. Does not wait for the device.
        """
        count, going = self.count[slots], self.going[slots]
        self.tokens[slots].scatter_(1, count[:, None], tokens[:, None])
        self.log_probs[slots].scatter_(1, count[:, None], log_probs[:, None])
        self.last[slots] = tokens
        count += going
        self.position[slots] += going
        going *= count < self.limit[slots]
        for group in groups:
            if group.ends is not None:
                going[group.rows] *= (tokens[group.rows][:, None] != group.ends).all(-1)

    def read_progress(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Wait for the device, and copy the first `rows` rows' progress to the host.

        Returns:
            Each response's tokens [rows] int64, and [rows] bool, True = has not ended.
        """
        count, going = torch.stack((self.count[:rows], self.going[:rows])).cpu().numpy()
        return count, going > 0

    def read(self, slots: Sequence[int], most: int) -> tuple[Tensor, Tensor]:
        """Wait for the device; return the slots' tokens and log-probs, [slots, most] each."""
        at = torch.tensor(slots).to(self.where)
        return self.tokens[at, :most].cpu(), self.log_probs[at, :most].cpu()

    def copy_rows(self, source: Tensor, target: Tensor) -> None:
        """Copy the states from slots `source` to slots `target`, overwriting them."""
        for state in (self.tokens, self.log_probs, self.uniforms, self.last, self.position,
                      self.count, self.limit, self.turn_start, self.going):  # fmt: skip
            state[target] = state[source]
