"""The sequences of one `generate`: the host's record of each, and their state on the device.

The host reads the drawn tokens only on request (`RowStates.progress`), so that it can launch
several decode steps without waiting for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from mindspeed_rlxf.rollout.protocol import FinishReason, GenerationRequest, GenerationResult
from mindspeed_rlxf.rollout.sampling import SamplingSettings, draw_tokens, uniform_numbers


@dataclass(eq=False)
class Growing:
    """One sample during its generation.

    sampling:          its settings; samples with equal settings are drawn together
    key:               identifies the prompt
    tokens, log_probs: the part of the response that the host has copied: all of a response that
                       has ended, the first part of a sample that waits for memory. For stop
                       strings only the tokens are copied earlier.
    """

    request: GenerationRequest
    sampling: SamplingSettings
    key: bytes
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    @classmethod
    def begin(cls, request: GenerationRequest) -> Growing:
        alike = replace(request.settings, max_new_tokens=0, stop=None)
        return cls(request, alike, request.prompt.tobytes())

    @property
    def settings(self) -> SamplingSettings:
        return self.request.settings

    @property
    def length(self) -> int:
        """Tokens of `known`."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def known(self) -> np.ndarray:
        """Input of a prefill: the prompt, and the tokens drawn before a wait; [tokens] int64."""
        return np.concatenate((self.request.prompt, np.asarray(self.tokens, dtype=np.int64)))

    def take(self, tokens: Sequence[int]) -> bool:
        """Append tokens until one ends the response; return whether one does."""
        for token in tokens:
            self.tokens.append(token)
            if self.settings.ends_with(self.tokens):
                return True
        return False

    def result(self, weights_version: int) -> GenerationResult:
        reason = FinishReason.of(self.tokens, self.settings)
        place = self.request.place
        return GenerationResult(place, self.tokens, self.log_probs, reason, weights_version)


@dataclass(frozen=True)
class Alike:
    """Rows with the same sampling settings.

    rows: [count] int64; None = all
    ends: [count] int64, ids that end a response; None = there are none
    """

    settings: SamplingSettings
    rows: Tensor | None
    ends: Tensor | None


class RowStates:
    """Tokens, log-probs and progress of the rows, on the device. Row i is slot i of the cache.

    Axes: slots = the most rows, width = the most tokens of a response
    A row that has ended is computed until the host reads the progress. Its further tokens are
    written to a column that is never read.
    """

    def __init__(self, slots: int, width: int, where: torch.device) -> None:
        self.width, self.where = width, where

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=where)

        self.tokens = zeros(slots, width + 1)
        self.log_probs = zeros(slots, width + 1, dtype=torch.float32)
        self.uniforms = zeros(slots, width + 1, dtype=torch.float32)
        self.last = zeros(slots)  # token, the input of the next decode step
        self.position = zeros(slots)  # of that token
        self.count = zeros(slots)  # tokens of the response
        self.limit = zeros(slots)  # of `count`
        self.going = zeros(slots)  # 1 = grows, 0 = has ended

    def begin(self, first: int, rows: Sequence[Growing]) -> None:
        """Set up the slots from `first` on for rows that will be prefilled."""
        shape, slots = (len(rows), self.width + 1), slice(first, first + len(rows))
        uniforms, log_probs = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        tokens, numbers = np.zeros(shape, np.int64), []
        for i, row in enumerate(rows):
            request, count, limit = row.request, len(row.tokens), row.settings.max_new_tokens
            if row.settings.do_sample:
                uniforms[i, :limit] = uniform_numbers(request.seed, request.sample_id, limit)
            tokens[i, :count], log_probs[i, :count] = row.tokens, row.log_probs[:count]
            numbers.append((len(request.prompt) + count - 1, count, limit, 1))
        self.uniforms[slots] = torch.from_numpy(uniforms).to(self.where)
        self.log_probs[slots] = torch.from_numpy(log_probs).to(self.where)
        self.tokens[slots] = torch.from_numpy(tokens).to(self.where)
        each = torch.tensor(numbers).to(self.where).unbind(1)
        self.position[slots], self.count[slots], self.limit[slots], self.going[slots] = each

    def group(self, rows: Sequence[Growing]) -> list[Alike]:
        """Group rows by their settings, apart from `max_new_tokens`."""
        found: dict[SamplingSettings, list[int]] = {}
        for i, row in enumerate(rows):
            found.setdefault(row.sampling, []).append(i)
        return [
            Alike(
                settings,
                torch.tensor(places).to(self.where) if len(found) > 1 else None,
                torch.tensor(settings.eos_token_ids).to(self.where)
                if settings.eos_token_ids
                else None,
            )
            for settings, places in found.items()
        ]

    def choose(self, logits: Tensor, slots: slice, groups: Sequence[Alike]) -> tuple[Tensor, ...]:
        """Choose next tokens [rows] int64 of slots, with log-probs [rows] fp32.

        logits: [rows, vocab] fp32
        """
        count = self.count[slots]
        uniforms = self.uniforms[slots].gather(1, count[:, None]).squeeze(1)
        if len(groups) == 1:
            return draw_tokens(logits, uniforms, count, groups[0].settings)
        tokens, log_probs = torch.zeros_like(count), torch.zeros_like(uniforms)
        for alike in groups:
            at = alike.rows
            assert at is not None, "several groups have their rows each"
            tokens[at], log_probs[at] = draw_tokens(
                logits[at], uniforms[at], count[at], alike.settings
            )
        return tokens, log_probs

    def append(
        self, tokens: Tensor, log_probs: Tensor, slots: slice, groups: Sequence[Alike]
    ) -> None:
        """Append a token to each of these rows that has not ended."""
        count, going = self.count[slots], self.going[slots]
        self.tokens[slots].scatter_(1, count[:, None], tokens[:, None])
        self.log_probs[slots].scatter_(1, count[:, None], log_probs[:, None])
        self.last[slots] = tokens
        count += going
        self.position[slots] += going
        going *= count < self.limit[slots]
        for alike in groups:
            if alike.ends is None:
                continue
            if alike.rows is None:
                going *= (tokens[:, None] != alike.ends).all(-1)
            else:
                going[alike.rows] *= (tokens[alike.rows][:, None] != alike.ends).all(-1)

    def progress(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Wait for the device; return counts [rows] int64 and which rows go on [rows] bool."""
        count, going = torch.stack((self.count[:rows], self.going[:rows])).cpu().numpy()
        return count, going > 0

    def read(self, slots: Sequence[int], most: int) -> tuple[Tensor, Tensor]:
        """Copy the first `most` tokens and log-probs of slots to the host, [slots, most] each."""
        at = torch.tensor(slots).to(self.where)
        return self.tokens[at, :most].cpu(), self.log_probs[at, :most].cpu()

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy rows to other slots; both [count] int64."""
        for state in (self.tokens, self.log_probs, self.uniforms, self.last, self.position,
                      self.count, self.limit, self.going):  # fmt: skip
            state[target] = state[source]
