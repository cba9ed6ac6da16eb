"""Sample prompts for each iteration from an endless, resumable stream."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_rlxf.config.problems import Problem, UserError


@dataclass(frozen=True)
class ConsumedPrompts:
    """A batch's prompts, each with `samples_per_prompt` samples with consecutive ids."""

    first_sample_id: int
    samples_per_prompt: int
    prompts: list[int]  # indices into the data set


class PromptSampler:
    """Endless batched stream of prompt indices.

    Every epoch has each index once, ascending or, with `shuffle`, in a permutation derived from
    (seed, epoch, source) alone. A batch reaching an epoch's end continues in the next: no prompt is
    dropped and every batch is full.
    """

    def __init__(
        self, num_prompts: int, batch_size: int, seed: int, shuffle: bool, source: int = 0
    ) -> None:
        assert num_prompts > 0 and batch_size > 0, "there must be prompts to sample"
        self._num_prompts = num_prompts
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._source = source
        self._epoch = 0
        self._offset = 0  # indices already taken from this epoch
        self._order = self._epoch_order(0)

    def next_batch(self) -> list[int]:
        """Return the next `batch_size` indices in [0, num_prompts)."""
        return self.take(self._batch_size)

    def take(self, count: int) -> list[int]:
        """Return the next `count` indices, across epochs, and advance."""
        batch: list[int] = []
        while len(batch) < count:
            indices = self._order[self._offset : self._offset + count - len(batch)]
            batch += indices.tolist()
            self._offset += len(indices)
            if self._offset == self._num_prompts:
                self._epoch += 1
                self._offset = 0
                self._order = self._epoch_order(self._epoch)
        return batch

    @property
    def num_taken(self) -> int:
        """Indices returned since the stream started."""
        return self._epoch * self._num_prompts + self._offset

    def state_dict(self) -> dict[str, Any]:
        """Return epoch and offset, and what sets the order: prompt count, seed and shuffle."""
        return {
            "epoch": self._epoch,
            "offset": self._offset,
            "num_prompts": self._num_prompts,
            "seed": self._seed,
            "shuffle": int(self._shuffle),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position; UserError if it belongs to another stream."""
        for key, value in self.state_dict().items():
            if key not in ("epoch", "offset") and state.get(key) != value:
                raise _other_stream(key, state.get(key), value)
        self._epoch = state["epoch"]
        self._offset = state["offset"]
        self._order = self._epoch_order(self._epoch)

    def _epoch_order(self, epoch: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        if not self._shuffle:
            return np.arange(self._num_prompts, dtype=np.int64)
        key = [self._seed, epoch, self._source] if self._source else [self._seed, epoch]
        return np.random.default_rng(key).permutation(self._num_prompts)


class MixtureSampler:
    """Endless stream of prompt indices mixing several sources by weight.

    Each source has its own PromptSampler and epochs; the data set holds their `sizes` prompts one
    source after another. The next prompt comes from the source furthest below its share, so none
    ever exceeds its share by a whole prompt.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        batch_size: int,
        seed: int,
        shuffle: bool,
    ) -> None:
        assert len(sizes) == len(weights), "each source needs a weight"
        self._batch_size = batch_size
        self._weights = [float(weight) for weight in weights]
        total = math.fsum(self._weights)
        self._shares = [weight / total for weight in self._weights]
        self._starts = [0, *itertools.accumulate(sizes)][:-1]
        self._sources = [
            PromptSampler(size, batch_size, seed, shuffle, source)
            for source, size in enumerate(sizes)
        ]

    def next_batch(self) -> list[int]:
        """Return the next `batch_size` indices into the whole data set."""
        batch: list[int] = []
        while len(batch) < self._batch_size:
            num_taken = sum(source.num_taken for source in self._sources)
            lags = []  # prompts that each source is behind, once another one is drawn
            for source, share in zip(self._sources, self._shares, strict=True):
                lags.append(share * (num_taken + 1) - source.num_taken)
            chosen = lags.index(max(lags))
            batch.append(self._starts[chosen] + self._sources[chosen].take(1)[0])
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return {"weights": weights, "sources": each source's sampler state}."""
        sources = [source.state_dict() for source in self._sources]
        return {"weights": self._weights, "sources": sources}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position; UserError if it belongs to another stream."""
        if state.get("weights") != self._weights:
            raise _other_stream("train_weights", state.get("weights"), self._weights)
        for source, saved in zip(self._sources, state["sources"], strict=True):
            source.load_state_dict(saved)


def make_sampler(
    sizes: Sequence[int], weights: Sequence[float], batch_size: int, seed: int, shuffle: bool
) -> PromptSampler | MixtureSampler:
    """Make a MixtureSampler if there are weights, else a PromptSampler over all prompts."""
    if weights:
        return MixtureSampler(sizes, weights, batch_size, seed, shuffle)
    return PromptSampler(sum(sizes), batch_size, seed, shuffle)


def _other_stream(key: str, saved: Any, current: Any) -> UserError:
    return UserError(
        Problem(
            "",
            f"sampler state has {key}={saved}, this run has {current}: the prompts would come in "
            "another order",
            remedy=f"use the {key} of the saved run, or set training.new_run=true",
        )
    )
