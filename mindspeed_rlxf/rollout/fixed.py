"""Use given responses instead of generated ones, to compare or replay runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mindspeed_rlxf.rollout.protocol import (
    FinishReason,
    GenerationRequest,
    GenerationResult,
    RolloutEngine,
)


def answer_from_table(
    engine: RolloutEngine,
    responses: Mapping[int, Sequence[int]],
    requests: Sequence[GenerationRequest],
) -> Iterator[GenerationResult]:
    """Answer requests with given responses, in the form of `RolloutEngine.generate`.

    The engine computes their log-probs.

    responses: sample id -> token ids, EOS included, at least one
    Raises KeyError for a sample without a response.
    """
    given = [list(responses[request.sample_id]) for request in requests]
    temperatures = {request.settings.logit_temperature for request in requests}
    assert len(temperatures) <= 1, f"one temperature for all of a batch, not {temperatures}"
    log_probs = engine.score([request.prompt for request in requests], given, *temperatures)
    for request, tokens, found in zip(requests, given, log_probs, strict=True):
        reason = FinishReason.of(tokens, request.settings)
        yield GenerationResult(request.place, tokens, found, reason, engine.weights_version)
