"""Which prompts the next iteration takes: a stream over epochs with a state of two numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mindspeed_rlxf.config.errors import Problem, UserError


@dataclass(frozen=True)
class ConsumedPrompts:
    """Prompts handed out, each `samples_per_prompt` times; sample ids count up."""

    first_sample_id: int
    samples_per_prompt: int
    prompts: list[int]  # indices in the data set


class PromptSampler:
    """Endless stream of prompt indices, cut in batches.

    Every epoch holds each index once: ascending, or with `shuffle` a permutation that derives from
    (seed, epoch) alone. A batch that reaches the end of an epoch goes on in the next, so no prompt
    is dropped and every batch is full, also when batch_size > num_prompts.

    num_prompts, batch_size: at least 1
    seed: at least 0
    """

    def __init__(self, num_prompts: int, batch_size: int, seed: int, shuffle: bool) -> None:
        for name, value, least in (
            ("num_prompts", num_prompts, 1),
            ("batch_size", batch_size, 1),
            ("seed", seed, 0),
        ):
            if value < least:
                raise ValueError(f"{name}={value} must be at least {least}")
        self._num_prompts = num_prompts
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._offset = 0  # indices of this epoch already given out
        self._order = self._epoch_order(0)

    @property
    def epoch(self) -> int:
        """Number of whole passes given out."""
        return self._epoch

    def next_batch(self) -> list[int]:
        """The next `batch_size` indices in [0, num_prompts)."""
        batch: list[int] = []
        while len(batch) < self._batch_size:
            wanted = self._batch_size - len(batch)
            batch += self._order[self._offset : self._offset + wanted].tolist()
            self._advance(min(wanted, self._num_prompts - self._offset))
        return batch

    def state_dict(self) -> dict[str, int]:
        """Position in the stream, with what the stream derives from. Free of the batch size."""
        return {
            "epoch": self._epoch,
            "offset": self._offset,
            "num_prompts": self._num_prompts,
            "seed": self._seed,
            "shuffle": int(self._shuffle),
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues the stream of `state`. Raises UserError for a state of another stream."""
        for key, value in self.state_dict().items():
            if key not in ("epoch", "offset") and state[key] != value:
                raise UserError(
                    Problem(
                        "",
                        f"sampler state has {key}={state[key]}, this run has {value}: the prompts "
                        "would come in another order",
                        remedy=f"use the {key} of the saved run, or set training.new_run=true",
                    )
                )
        self._epoch = state["epoch"]
        self._offset = state["offset"]
        self._order = self._epoch_order(self._epoch)

    def _advance(self, count: int) -> None:
        self._offset += count
        if self._offset == self._num_prompts:
            self._epoch += 1
            self._offset = 0
            self._order = self._epoch_order(self._epoch)

    def _epoch_order(self, epoch: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        if not self._shuffle:
            return np.arange(self._num_prompts, dtype=np.int64)
        return np.random.default_rng([self._seed, epoch]).permutation(self._num_prompts)
