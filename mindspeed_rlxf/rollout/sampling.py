"""Choose next tokens, with one independent random stream per sample.

A sample's random numbers depend on (seed, sample id, position) only, not on the other samples of
the batch, the rank or the layout.

Everything is computed on the device of the logits. The device need not have fp64: the running sum
of the probabilities is taken over blocks of the vocabulary, then within the block that was drawn.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_rlxf.rollout.stop_strings import StopStrings

BLOCK = 512  # ids of the vocabulary that one sum covers
# In fp32 less than 1; its product with a positive number is less than the number.
BELOW_ONE = 1 - 2**-23


@dataclass(frozen=True)
class SamplingSettings:
    """Settings of generation; `temperature` divides the logits when sampling."""

    do_sample: bool
    temperature: float
    top_k: int  # 0 = off
    top_p: float  # 1 = off
    min_new_tokens: int
    max_new_tokens: int
    eos_token_ids: tuple[int, ...]
    stop: StopStrings | None = None

    def ends_with(self, tokens: Sequence[int]) -> bool:
        """Whether a response ends with its last token, by EOS or by a string.

        tokens: of the whole response, at least one
        """
        if tokens[-1] in self.eos_token_ids:
            return True
        return (
            self.stop is not None
            and len(tokens) >= self.min_new_tokens
            and self.stop.is_completed_by(tokens)
        )

    def end(self, tokens: Sequence[int]) -> bool:
        """Call `ends_with` under its older name, for rollout engines of plugins."""
        warnings.warn("SamplingSettings.end is now ends_with", FutureWarning, stacklevel=2)
        return self.ends_with(tokens)

    @property
    def logit_temperature(self) -> float:
        """The temperature of log-probs in generation and training: 1 for greedy decoding."""
        return self.temperature if self.do_sample else 1.0


def uniform_numbers(seed: int, sample_id: int, count: int) -> np.ndarray:
    """Return [count] fp64 random numbers of one sample in [0, 1) (counter-based, Philox)."""
    return np.random.Generator(np.random.Philox(key=[seed, sample_id])).random(count)


def choose_tokens(
    logits: Tensor, uniforms: Tensor, generated: Tensor, settings: SamplingSettings
) -> tuple[Tensor, Tensor]:
    """Choose the next token of each row; log-probs are before any filtering.

    logits:    [rows, vocab] fp32
    uniforms:  [rows] in [0, 1), on any device, not used when greedy
    generated: [rows] int64, tokens that the row has produced so far
    Returns [rows] int64 and [rows] fp32 on the device of `logits`.
    Raises FloatingPointError for logits that are no numbers, or that allow no token.
    """
    tokens, log_probs = draw_tokens(logits, uniforms.float().to(logits.device), generated, settings)
    check_log_probs(log_probs.cpu())
    return tokens, log_probs


def draw_tokens(
    logits: Tensor, uniforms: Tensor, generated: Tensor, settings: SamplingSettings
) -> tuple[Tensor, Tensor]:
    """Choose as `choose_tokens`, without waiting for the device; a failure has a log-prob of nan.

    uniforms: [rows] fp32 in [0, 1], on the device of `logits`
    """
    warm = settings.logit_temperature != 1.0
    # not `chosen - logsumexp`, which loses the digits of a log-prob near 0 to large logits
    logs = (logits / settings.logit_temperature if warm else logits).log_softmax(dim=-1)
    allowed = _forbid_early_eos(logs, generated, settings)
    if not settings.do_sample:
        tokens = allowed.argmax(dim=-1)
        return tokens, logs.gather(-1, tokens[:, None]).squeeze(-1)
    allowed = _filtered(allowed, settings.top_k, settings.top_p)
    if allowed is not logs:  # what is left may be small
        allowed = allowed - allowed.amax(dim=-1, keepdim=True)
    tokens, total = _inverse_cdf(allowed.exp(), uniforms)
    return tokens, logs.gather(-1, tokens[:, None]).squeeze(-1) + 0.0 * total


def check_log_probs(log_probs: Tensor) -> None:
    """Raise FloatingPointError where a log-prob of `draw_tokens`, on the host, is nan."""
    if log_probs.isnan().any():
        raise FloatingPointError(
            "logits to sample from must be numbers, at least one in a row above -inf; found nan or "
            "inf: look for nan in the weights and for ids that are all forbidden"
        )


def _forbid_early_eos(logits: Tensor, generated: Tensor, settings: SamplingSettings) -> Tensor:
    """Set the logits of EOS to -inf in rows with fewer than `min_new_tokens` tokens."""
    if not settings.eos_token_ids or settings.min_new_tokens == 0:
        return logits
    early = generated < settings.min_new_tokens
    forbidden = torch.zeros_like(logits, dtype=torch.bool)
    forbidden[:, list(settings.eos_token_ids)] = True
    return logits.masked_fill(forbidden & early[:, None], float("-inf"))


def _filtered(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Filter by top-k, then top-p: the smallest set of tokens whose probability reaches top_p."""
    if 0 < top_k < logits.size(-1):
        smallest_kept = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest_kept, float("-inf"))
    if top_p < 1.0:
        logits = logits.masked_fill(_improbable(logits, top_p), float("-inf"))
    return logits


def _improbable(logits: Tensor, top_p: float) -> Tensor:
    """Mark the tokens that top-p drops, [rows, vocab]. The sorted copies are freed on return."""
    ordered, order = logits.sort(dim=-1, descending=True)
    probabilities = ordered.softmax(dim=-1)
    del ordered
    over = running_sum(probabilities).sub_(probabilities) >= top_p
    return over.scatter(-1, order, over)


def _inverse_cdf(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw the token at which the cumulative probability passes the uniform number.

    The cumulative probability is exact within 1e-6. Every uniform number gives a token of
    positive weight.

    weights:  [rows, vocab] fp32 of any positive total
    uniforms: [rows] fp32 in [0, 1]
    Returns tokens [rows] int64 and totals [rows] fp32, nan where the weights are no numbers.
    """
    rows, vocab = weights.shape
    if vocab > BLOCK:
        weights = F.pad(weights, (0, -vocab % BLOCK)) if vocab % BLOCK else weights
        blocks = weights.view(rows, -1, BLOCK)
        block, rest, total = _find(blocks.sum(dim=-1), uniforms)
        weights = blocks[torch.arange(rows, device=block.device), block]
        place, _, _ = _find(weights, rest)
        return block * BLOCK + place, total
    place, _, total = _find(weights, uniforms)
    return place, total


def _find(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find where cumulative weights pass uniform * total, and the rest of the uniform number there.

    weights:  [rows, n] of any positive total
    uniforms: [rows] in [0, 1]
    Returns the places [rows] int64, whose weights are positive, the rests [rows] in [0, 1], and
    the totals [rows].
    """
    ends = running_sum(weights)
    total = ends[:, -1]
    # Below the total, which a uniform number of 1 would not pass.
    targets = torch.minimum(uniforms * total, total * BELOW_ONE)[:, None]
    places = _first_passing(ends, targets, weights)
    weight = weights.gather(-1, places)
    rest = (targets - (ends.gather(-1, places) - weight)) / weight
    return places.squeeze(-1), rest.squeeze(-1).clamp(0.0, 1.0), total


def _first_passing(ends: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Return the first place of positive weight whose end passes the target, [rows, 1] int64.

    If no end passes, it is the last place of positive weight; without such a place, the first one.
    A binary search would be wrong: the sums of parallel scans may fall, and may rise at a weight
    of 0.
    """
    n = weights.size(-1)
    # in fp32, as not every device finds the smallest of integers
    number = torch.arange(n, device=weights.device, dtype=torch.float32)
    positive = weights > 0
    first = torch.where(positive & (ends > targets), number, n).amin(dim=-1, keepdim=True)
    last = torch.where(positive, number, 0).amax(dim=-1, keepdim=True)
    return torch.minimum(first, last).long()


def running_sum(numbers: Tensor) -> Tensor:
    """Return the running sums of the last dimension.

    With deterministic algorithms on another device than the CPU it uses `doubled_sum`, because
    torch refuses its own scan there.
    """
    if numbers.device.type == "cpu" or not torch.are_deterministic_algorithms_enabled():
        return numbers.cumsum(dim=-1)
    return doubled_sum(numbers)


def doubled_sum(numbers: Tensor) -> Tensor:
    """Return the running sums of the last dimension, always added in the same order.

    In turn k each number gets the number 2^k places before it added.
    """
    sums, distance = numbers.clone(), 1
    while distance < sums.size(-1):
        sums[..., distance:] += sums[..., :-distance].clone()
        distance *= 2
    return sums
