"""Choose next tokens, with one independent random stream per sample.

A sample's random numbers depend on (seed, sample id, position) alone: which other samples are in
the batch, on which rank and in which layout it is generated does not matter.

An NPU computes in fp32 where fp64 is asked for. So the device sums blocks of the vocabulary in
fp32, and the host finds the block, then the token in it, in fp64: two small copies per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_rlxf.rollout.stop_strings import StopStrings

BLOCK = 512  # ids of the vocabulary that one fp32 sum covers


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

    def end(self, tokens: Sequence[int]) -> bool:
        """Whether a response ends with its last token, by EOS or by a string.

        tokens: of the whole response, at least one
        """
        if tokens[-1] in self.eos_token_ids:
            return True
        return (
            self.stop is not None and len(tokens) >= self.min_new_tokens and self.stop.end(tokens)
        )

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
    uniforms:  [rows] fp64 in [0, 1) on the host, not used when greedy
    generated: [rows] int64, tokens that the row has produced so far
    Returns [rows] int64 and [rows] fp32 on the device of `logits`.
    """
    logits = logits / settings.logit_temperature
    allowed = _forbid_early_eos(logits, generated, settings)
    if settings.do_sample:
        tokens = _inverse_cdf(_filtered(allowed, settings.top_k, settings.top_p), uniforms)
    else:
        tokens = allowed.argmax(dim=-1)
    # not `chosen - logsumexp`, which loses the digits of a log-prob near 0 to large logits
    log_probs = logits.log_softmax(dim=-1).gather(-1, tokens[:, None])
    return tokens, log_probs.squeeze(-1)


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
        ordered, order = logits.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        dropped = (before >= top_p).scatter(-1, order, before >= top_p)
        logits = logits.masked_fill(dropped, float("-inf"))
    return logits


def _inverse_cdf(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Draw the token at which the cumulative probability passes the uniform number.

    A vocabulary of one block is drawn from in fp64 throughout. In a larger one the probability of
    a block has the error of an fp32 sum of 512 numbers (about 1e-7 of it); within a block, and from
    block to block, nothing is rounded to fp32. Every uniform number gives a token of positive
    probability. Raises FloatingPointError where a row has none.
    """
    vocab = logits.size(-1)
    weights = (logits - logits.amax(dim=-1, keepdim=True)).exp_()
    blocks = F.pad(weights, (0, -vocab % BLOCK)).unflatten(-1, (-1, BLOCK)).sum(dim=-1).cpu()
    if not blocks.isfinite().all():
        raise FloatingPointError(
            "logits to sample from must be numbers, at least one in a row above -inf; found nan or "
            "inf: look for nan in the weights and for ids that are all forbidden"
        )
    block, within = _find(blocks.double(), uniforms)
    ids = block[:, None] * BLOCK + torch.arange(BLOCK)
    held = logits.gather(-1, ids.clamp(max=vocab - 1).to(logits.device)).cpu()
    held = held.masked_fill(ids >= vocab, float("-inf"))
    place, _ = _find(held.double().softmax(dim=-1), within)
    return (block * BLOCK + place).to(logits.device)


def _find(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Find where cumulative weights pass uniform * total, and the rest of the uniform number there.

    weights:  [rows, n] fp64 of any positive total, on the host
    uniforms: [rows] fp64 in [0, 1]
    Returns [rows] int64, places of positive weight, and [rows] fp64 in [0, 1].
    """
    shares = weights / weights.sum(dim=-1, keepdim=True)
    ends = shares.cumsum(dim=-1)
    total = ends[:, -1:]
    # Below the total, so that the end which passes it belongs to a share that is not 0.
    targets = torch.minimum(uniforms[:, None] * total, total.nextafter(torch.zeros_like(total)))
    places = torch.searchsorted(ends, targets, right=True)
    share = shares.gather(-1, places)
    rest = (targets - (ends.gather(-1, places) - share)) / share
    return places.squeeze(-1), rest.squeeze(-1).clamp(0.0, 1.0)
