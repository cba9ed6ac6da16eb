"""Adapter for engines that only generate whole responses: vLLM, transformers, plugins."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from torch import Tensor

from mindspeed_rlxf.rollout.rollout_engine import (
    GenerationRequest,
    GenerationResult,
    GenerationStats,
    RolloutEngine,
)


class WholeResponses:
    """Makes a `RolloutEngine` a `StepwiseEngine`: a slice runs until nothing is left.

    A part of a response that another engine began is not used: the response is generated anew.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine
        self._queue: list[GenerationRequest] = []

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Append requests to the queue."""
        self._queue += requests

    def advance(self, steps: int | None) -> Iterator[GenerationResult]:
        """Generate all responses to the end, whatever `steps`."""
        requests, self._queue = self._queue, []
        yield from self.engine.generate(requests)

    def withdraw(self) -> list[GenerationRequest]:
        """Return the requests that no `advance` has generated."""
        requests, self._queue = self._queue, []
        return requests

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See `RolloutEngine.update_weights`."""
        self.engine.update_weights(tensors, version)

    def wake(self) -> None:
        """See `RolloutEngine.wake`."""
        self.engine.wake()

    def sleep(self) -> None:
        """See `RolloutEngine.sleep`."""
        self.engine.sleep()

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationResult]:
        """See `RolloutEngine.generate`."""
        assert not self._queue, "other requests are unfinished"
        return self.engine.generate(requests)

    def score(
        self,
        prompts: Sequence[np.ndarray],
        responses: Sequence[Sequence[int]],
        temperature: float = 1.0,
    ) -> list[list[float]]:
        """See `RolloutEngine.score`."""
        return self.engine.score(prompts, responses, temperature)

    def stats(self) -> GenerationStats:
        """See `RolloutEngine.stats`."""
        return self.engine.stats()

    @property
    def weights_version(self) -> int:
        """See `RolloutEngine.weights_version`."""
        return self.engine.weights_version
