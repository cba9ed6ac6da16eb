"""Change the training weights for a moment, to see whether a rollout engine computes with them.

The new weights go through the same stream and the same loading as those of an update. Training and
the engine then score the same random tokens. A tensor that the engine did not take, or packed for
an older update, makes the log-probs differ.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mindspeed_rlxf.config.schema import ActorConfig
from mindspeed_rlxf.data.batch import Rollouts
from mindspeed_rlxf.engine.train_engine import TrainEngine

PROBE = -1  # version of the changed weights
NUM_ROWS = 4
MAX_TOKENS = 64  # of a row: prompt and response have half each
NOISE_SIZE = 2**20 + 7  # a prime: rows of a matrix, whatever their length, get other noise
GAIN = 1.25  # of changed weights: attention must depend on queries and keys, but not on rounding
ZERO_STD = 0.3  # of the values that replace zeros
GAP_PER_NOISE = {torch.float32: 10.0, torch.bfloat16: 2.0}
"""Largest gap, in units of the noise of rounding.

On SmolLM2 (30 layers) in fp32 a correct server differs by 3 units, one stale tensor by 800. In bf16
rounding and a stale tensor are closer: 5 units on a random Llama of 8 layers.
"""
SMALLEST_LIMIT = 2e-3  # in fp32 the noise is below what other kernels of an engine do


def probe_rows(seq_length: int, actor: ActorConfig) -> Rollouts:
    """Return rows of random tokens, on which two engines' log-probs are compared."""
    size = min(MAX_TOKENS, seq_length) // 2
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(actor.architecture.vocab_size, (NUM_ROWS, 2 * size), generator=draw)
    mask = torch.ones(NUM_ROWS, size, dtype=torch.bool)
    return Rollouts(
        sample_ids=list(range(NUM_ROWS)),
        prompt_ids=tokens[:, :size],
        prompt_lengths=torch.full((NUM_ROWS,), size),
        response_ids=tokens[:, size:],
        response_mask=mask,
        trained_mask=mask,
        has_eos=mask[:, 0],
        rollout_log_probs=mask.float(),
        ground_truths=[""] * NUM_ROWS,
        data_sources=[""] * NUM_ROWS,
        weights_version=mask.int(),
    )


@torch.no_grad()
def change_weight(weight: Tensor, noise: Tensor, rounding: float) -> None:
    """Change a weight strongly, in place; its size and its mean of about 0 remain.

    Half of the elements, chosen by noise, change their sign; a tensor of zeros (an adapter's B, a
    bias) becomes noise. So the hidden states keep their size and depend on every tensor. The noise
    depends on the position in this rank's tensor alone: copies on other ranks stay copies.

    Args:
        weight: Contiguous, of any shape.
        noise: [NOISE_SIZE] normal, on the weight's device.
        rounding: Standard deviation of a second, relative noise.
    """
    other_noise = noise.flip(0)
    is_zero = not bool(weight.any())
    for elements in weight.view(-1).split(NOISE_SIZE):
        its_noise = noise[: len(elements)]
        changed = ZERO_STD * its_noise if is_zero else GAIN * its_noise.sign() * elements.float()
        elements.copy_(changed * (1 + rounding * other_noise[: len(elements)]))


@dataclass(frozen=True)
class ProbeReport:
    """What training computes with the changed weights.

    Attributes:
        log_probs: One list for each row.
        noise: Difference of these log-probs to those of another packing, with weights that are
            rounded otherwise.
        gap_per_noise: Largest difference of another correct engine, in units of `noise`.
    """

    log_probs: list[list[float]]
    noise: float
    gap_per_noise: float = GAP_PER_NOISE[torch.bfloat16]

    @property
    def limit(self) -> float:
        """The largest difference of another engine's log-probs."""
        return max(SMALLEST_LIMIT, self.gap_per_noise * self.noise)

    def gap(self, log_probs: list[list[float]]) -> float:
        """Return the difference to another engine's log-probs."""
        return difference(torch.tensor(log_probs), torch.tensor(self.log_probs))


def difference(some: Tensor, others: Tensor) -> float:
    """Return the root mean square, which also a few tokens (those of an expert) make large."""
    return float((some - others).square().mean().sqrt())


class ChangedWeights:
    """An engine's weights, changed until `restore`. Every tensor of its stream is changed.

    All weights of the rank are, adapters among them, so whatever the stream makes of them is.
    """

    def __init__(self, engine: TrainEngine, dtype: torch.dtype) -> None:
        """Keep copies on the host; `dtype` is the one that the engine computes in."""
        self.engine = engine
        self._gap_per_noise = GAP_PER_NOISE[dtype]
        self._rounding = torch.finfo(dtype).eps / 4  # as much as activations are rounded
        self._noise = torch.randn(NOISE_SIZE, generator=torch.Generator().manual_seed(0))
        with engine.changing_weights() as weights:
            self._originals = [(weight, weight.to("cpu", copy=True)) for weight in weights]

    def change(self, rows: Rollouts) -> ProbeReport | None:
        """Change the weights and score the rows, at temperature 1; None beside replica leaders."""
        backwards = range(rows.num_rows - 1, -1, -1)
        self._set(self._rounding)
        rounded = self.engine.log_probs(rows.select(backwards), 1.0)
        self._set(0.0)
        exact = self.engine.log_probs(rows, 1.0)
        if rounded is None or exact is None:
            return None
        noise = difference(exact.log_probs, rounded.select(backwards).log_probs)
        return ProbeReport(exact.log_probs.tolist(), noise, self._gap_per_noise)

    def _set(self, rounding: float) -> None:
        with self.engine.changing_weights():
            for weight, original in self._originals:
                weight.copy_(original)
                self._noise = self._noise.to(weight.device)  # once
                change_weight(weight, self._noise, rounding)

    def restore(self) -> None:
        """Put the weights back, bit by bit, and free the copies."""
        with self.engine.changing_weights():
            for weight, original in self._originals:
                weight.copy_(original)
        self._originals = []
