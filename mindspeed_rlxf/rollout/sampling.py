"""Choose next tokens, with an independent random stream per sample.

A sample's random numbers depend only on (seed, sample id, position), not on other samples, the rank
or the layout.

All tensors are on the logits' device, which need not have fp64: cumulative probabilities are taken
over vocabulary blocks first, then within the drawn block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_rlxf.data.decoding import decode, decode_without_special, special_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class StopStrings:
    """Strings that end a response and stay in it.

    They are searched in the decoded text, because a string has several tokenizations. Special
    tokens are in that text only for a string that spells one.
    """

    strings: tuple[str, ...]
    tokenizer: PreTrainedTokenizerBase = field(compare=False, repr=False)

    @cached_property
    def _with_special(self) -> tuple[str, ...]:
        """The strings that spell a special token."""
        special = special_ids(self.tokenizer).values()
        return tuple(s for s in self.strings if any(token in s for token in special))

    @cached_property
    def _without_special(self) -> tuple[str, ...]:
        return tuple(s for s in self.strings if s not in self._with_special)

    def is_completed_by(self, tokens: Sequence[int]) -> bool:
        """Return whether the last token completes one string, given the response so far."""
        return self._is_completed(
            tokens, self._without_special, decode_without_special
        ) or self._is_completed(tokens, self._with_special, decode)

    def _is_completed(
        self,
        tokens: Sequence[int],
        strings: tuple[str, ...],
        text_of: Callable[[PreTrainedTokenizerBase, Sequence[int]], str],
    ) -> bool:
        if not strings:
            return False
        # One token for each byte of the longest string, and eight before, as neighbours may change
        # the text of a token.
        window = 8 + max(len(string.encode()) for string in strings)
        text = text_of(self.tokenizer, tokens[-window:])
        if not any(string in text for string in strings):
            return False
        before = text_of(self.tokenizer, tokens[-window:-1])
        return any(text.count(string) > before.count(string) for string in strings)


BLOCK = 512  # ids of the vocabulary that one sum covers


class Sampling(Enum):
    """Token selection: the actor's keys, greedy, or the validation keys."""

    TRAINING = "training"
    GREEDY = "greedy"
    VALIDATION = "validation"


@dataclass(frozen=True)
class SamplingSettings:
    """Generation settings."""

    do_sample: bool  # False = greedy: the most likely token, whatever temperature, top_k and top_p
    temperature: float  # divides the logits
    top_k: int  # 0 = off
    top_p: float  # 1 = off
    min_new_tokens: int  # no EOS is drawn and no stop string counts before
    max_new_tokens: int
    eos_token_ids: tuple[int, ...]
    stop: StopStrings | None = None

    def ends_with(self, tokens: Sequence[int]) -> bool:
        """Return whether the last token (there is one) is an EOS or completes a stop string.

        A stop string counts from `min_new_tokens` on; `max_new_tokens` is ignored.
        """
        if tokens[-1] in self.eos_token_ids:
            return True
        return (
            self.stop is not None
            and len(tokens) >= self.min_new_tokens
            and self.stop.is_completed_by(tokens)
        )

    @property
    def logit_temperature(self) -> float:
        """Divides the logits for log-probs in generation and training; 1 when greedy."""
        return self.temperature if self.do_sample else 1.0


def uniform_numbers(seed: int, sample_id: int, count: int) -> np.ndarray:
    """Return [count] fp64 random numbers in [0, 1), which depend only on seed and sample id.

    The generator is counter-based (Philox): a smaller count gives the first numbers.
    """
    return np.random.Generator(np.random.Philox(key=[seed, sample_id])).random(count)


def attempt_seed(seed: int, attempt: int) -> int:
    """Return the seed of a conversation that has taken back `attempt` turns; `seed` for none."""
    if attempt == 0:
        return seed
    return int(np.random.SeedSequence([seed, attempt]).generate_state(1)[0])


def choose_tokens(
    logits: Tensor, uniforms: Tensor, generated: Tensor, settings: SamplingSettings
) -> tuple[Tensor, Tensor]:
    """Choose each row's next token. Waits for the device.

    Args:
        logits: [rows, vocab] fp32, before the temperature.
        uniforms: [rows] random numbers in [0, 1), on any device; unused when greedy.
        generated: [rows] int64, tokens in each response, on any device.
        settings: Sampling settings.

    Returns:
        Tokens [rows] int64 and their log-probs [rows] fp32, on the logits' device. Log-probs are at
        `logit_temperature`, before top-k, top-p and the ban on an early EOS.

    Raises:
        FloatingPointError: Logits are nan, or allow no token.
    """
    ends = torch.tensor(settings.eos_token_ids, dtype=torch.int64, device=logits.device)
    uniforms, generated = uniforms.float().to(logits.device), generated.to(logits.device)
    tokens, log_probs = draw_tokens(logits, uniforms, generated, settings, ends)
    check_log_probs(log_probs.cpu())
    return tokens, log_probs


def draw_tokens(
    logits: Tensor,
    uniforms: Tensor,
    generated: Tensor,
    settings: SamplingSettings,
    ends: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Choose as `choose_tokens`, but without waiting for the device or raising.

    `uniforms`, [rows] fp32 in [0, 1], `generated`, and `ends`, the [count] int64 EOS ids or None,
    are on the logits' device. Instead of an error the log-prob is nan (see `check_log_probs`).
    """
    warm = settings.logit_temperature != 1.0
    # not `chosen - logsumexp`, which loses the digits of a log-prob near 0 to large logits
    logs = (logits / settings.logit_temperature if warm else logits).log_softmax(dim=-1)
    forbids_ends = ends is not None and ends.numel() > 0 and settings.min_new_tokens > 0
    if forbids_ends:  # in place: no other token of a row changes
        early = (generated < settings.min_new_tokens)[:, None]
        logs[:, ends] = logs[:, ends].masked_fill(early, float("-inf"))
    if not settings.do_sample:
        tokens = logs.argmax(dim=-1)
        return tokens, logs.gather(-1, tokens[:, None]).squeeze(-1)
    allowed = _filter_top_k_and_p(logs, settings.top_k, settings.top_p)
    # The probabilities of the tokens that are allowed may be small.
    if forbids_ends or allowed is not logs:
        allowed = allowed - allowed.amax(dim=-1, keepdim=True)
    tokens, total = _draw_by_inverse_cdf(allowed.exp(), uniforms)
    return tokens, logs.gather(-1, tokens[:, None]).squeeze(-1) + 0.0 * total


def check_log_probs(log_probs: Tensor) -> None:
    """Raise FloatingPointError if a log-prob from `draw_tokens`, copied to the host, is nan."""
    if log_probs.isnan().any():
        raise FloatingPointError(
            "logits to sample from must be numbers, at least one in a row above -inf; found nan or "
            "inf: look for nan in the weights and for ids that are all forbidden"
        )


def _filter_top_k_and_p(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    if 0 < top_k < logits.size(-1):
        smallest_kept = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest_kept, float("-inf"))
    if top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(dim=-1)
        del ordered
        over = cumulative_sum(probabilities).sub_(probabilities) >= top_p
        logits = logits.masked_fill(over.scatter(-1, order, over), float("-inf"))
    return logits


def _draw_by_inverse_cdf(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw from each row the token at which the cumulative probability passes the uniform number.

    The cumulative probability is exact within 1e-6. Every uniform number in [0, 1] gives a token
    with positive weight. Weights [rows, vocab] fp32 are probabilities times any positive number.
    Also returns their sums [rows] fp32, nan if a weight is nan.
    """
    rows, vocab = weights.shape
    if vocab > BLOCK:
        weights = F.pad(weights, (0, -vocab % BLOCK)) if vocab % BLOCK else weights
        blocks = weights.view(rows, -1, BLOCK)
        block, rest, total = _find_crossing(blocks.sum(dim=-1), uniforms)
        weights = blocks[torch.arange(rows, device=block.device), block]
        index, _, _ = _find_crossing(weights, rest)
        return block * BLOCK + index, total
    index, _, total = _find_crossing(weights, uniforms)
    return index, total


def _find_crossing(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    ends = cumulative_sum(weights)
    total = ends[:, -1]
    # Below the total, which a uniform number of 1 would not pass: the fp32 product of a positive
    # number and 1 - 2^-23 is less than the number.
    targets = torch.minimum(uniforms * total, total * (1 - 2**-23))[:, None]
    n = weights.size(-1)
    # in fp32, as not every device finds the smallest of integers
    # No binary search: sums of parallel scans may fall, and may rise at a weight of 0.
    number = torch.arange(n, device=weights.device, dtype=torch.float32)
    positive = weights > 0
    first = torch.where(positive & (ends > targets), number, n).amin(dim=-1, keepdim=True)
    last = torch.where(positive, number, 0).amax(dim=-1, keepdim=True)
    indices = torch.minimum(first, last).long()
    weight = weights.gather(-1, indices)
    rest = (targets - (ends.gather(-1, indices) - weight)) / weight
    return indices.squeeze(-1), rest.squeeze(-1).clamp(0.0, 1.0), total


def cumulative_sum(numbers: Tensor) -> Tensor:
    """Return the cumulative sum over the last dimension.

    Under deterministic algorithms torch refuses its own cumsum on devices other than the CPU; then
    this uses `fixed_order_sum`.
    """
    if numbers.device.type == "cpu" or not torch.are_deterministic_algorithms_enabled():
        return numbers.cumsum(dim=-1)
    return fixed_order_sum(numbers)


def fixed_order_sum(numbers: Tensor) -> Tensor:
    """Return the inclusive cumulative sum over the last dimension, added in a fixed order.

    A scan by doubling: step k adds to each element the element 2^k positions before it.
    """
    sums, distance = numbers.clone(), 1
    while distance < sums.size(-1):
        sums[..., distance:] += sums[..., :-distance].clone()
        distance *= 2
    return sums
