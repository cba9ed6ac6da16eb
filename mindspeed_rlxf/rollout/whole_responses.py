"""Adapter for engines that only generate whole responses: transformers, plugins."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from mindspeed_rlxf.rollout.rollout_engine import (
    Begun,
    GenerationRequest,
    GenerationResult,
    GenerationStats,
    RolloutEngine,
)


class WholeResponses:
    """Makes a `RolloutEngine` a `StepwiseEngine`: a slice runs until nothing is left.

    A part of a response that another engine began is not used: the response is generated anew.
    The turns before the one that is asked for become the end of its prompt.
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
        earlier_turns: dict[int, Begun] = {}
        whole: list[GenerationRequest] = []
        for request in requests:
            if request.turn_start:
                assert request.begun is not None, "earlier turns are the begun part"
                earlier_turns[request.place] = request.begun
                request = _as_prompt(request, request.begun)
            whole.append(request)
        for result in self.engine.generate(whole):
            begun = earlier_turns.get(result.place)
            yield result if begun is None else _behind(begun, result)

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


def _as_prompt(request: GenerationRequest, begun: Begun) -> GenerationRequest:
    """Return the request for a turn behind the prompt and the turns before it."""
    earlier = np.asarray(begun.tokens[: request.turn_start], dtype=np.int64)
    limit = request.settings.max_new_tokens - request.turn_start
    return replace(
        request,
        prompt=np.concatenate((request.prompt, earlier)),
        settings=replace(request.settings, max_new_tokens=limit),
        begun=None,
    )


def _behind(begun: Begun, turn: GenerationResult) -> GenerationResult:
    """Return a turn with the part of the response before it."""
    return replace(
        turn,
        tokens=begun.tokens + turn.tokens,
        log_probs=begun.log_probs + turn.log_probs,
        versions=begun.versions + turn.token_versions,
    )
