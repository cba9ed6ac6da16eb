"""Given responses in place of generated ones: to compare runs, and to replay one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from torch import Tensor

from mindspeed_rlxf.rollout.protocol import (
    FinishReason,
    GenerationRequest,
    GenerationResult,
    GenerationStats,
    RolloutEngine,
)


class FixedResponsesEngine:
    """Answers requests from a table; log-probs are those that the engine behind it computes."""

    def __init__(self, inner: RolloutEngine, responses: Mapping[int, Sequence[int]]) -> None:
        """responses: sample id -> token ids, EOS included, at least one"""
        self.inner, self.responses = inner, responses

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationResult]:
        """As `RolloutEngine.generate`. Raises KeyError for a sample without a response."""
        given = [list(self.responses[request.sample_id]) for request in requests]
        temperatures = {request.settings.logit_temperature for request in requests}
        assert len(temperatures) <= 1, f"one temperature for all of a batch, not {temperatures}"
        prompts = [request.prompt for request in requests]
        log_probs = self.inner.score(prompts, given, *temperatures)
        version = self.inner.weights_version
        for request, tokens, found in zip(requests, given, log_probs, strict=True):
            reason = FinishReason.of(tokens, request.settings)
            yield GenerationResult(request.place, tokens, found, reason, version)

    def score(
        self,
        prompts: Sequence[np.ndarray],
        responses: Sequence[Sequence[int]],
        temperature: float = 1.0,
    ) -> list[list[float]]:
        return self.inner.score(prompts, responses, temperature)

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.inner.update_weights(tensors, version)

    def wake(self) -> None:
        self.inner.wake()

    def sleep(self) -> None:
        self.inner.sleep()

    def stats(self) -> GenerationStats:
        return self.inner.stats()

    @property
    def weights_version(self) -> int:
        return self.inner.weights_version
