"""Sample prompts for each iteration: a stream over epochs that can be saved and continued."""

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
        assert num_prompts > 0 and batch_size > 0, "there must be prompts to sample"
        self._num_prompts, self._batch_size = num_prompts, batch_size
        self._seed, self._shuffle = seed, shuffle
        self._epoch = self._offset = 0  # offset: indices of this epoch already given out
        self._order = self._epoch_order(0)

    def next_batch(self) -> list[int]:
        """Return the next `batch_size` indices in [0, num_prompts)."""
        batch: list[int] = []
        while len(batch) < self._batch_size:
            part = self._order[self._offset : self._offset + self._batch_size - len(batch)]
            batch += part.tolist()
            self._offset += len(part)
            if self._offset == self._num_prompts:
                self._epoch, self._offset = self._epoch + 1, 0
                self._order = self._epoch_order(self._epoch)
        return batch

    def state_dict(self) -> dict[str, int]:
        """Return the position in the stream and what its order derives from, without batch size."""
        return {
            "epoch": self._epoch,
            "offset": self._offset,
            "num_prompts": self._num_prompts,
            "seed": self._seed,
            "shuffle": int(self._shuffle),
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue the stream of `state`. Raises UserError for a state of another stream."""
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
        self._epoch, self._offset = state["epoch"], state["offset"]
        self._order = self._epoch_order(self._epoch)

    def _epoch_order(self, epoch: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        if not self._shuffle:
            return np.arange(self._num_prompts, dtype=np.int64)
        return np.random.default_rng([self._seed, epoch]).permutation(self._num_prompts)
