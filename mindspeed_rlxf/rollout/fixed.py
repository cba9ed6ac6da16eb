"""Use given responses instead of generated ones, to compare or replay runs."""

from collections.abc import Iterator, Mapping, Sequence

from mindspeed_rlxf.rollout.rollout_engine import (
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
    """Yield each request's given response as a result, in the order of the requests.

    The engine computes the log-probs of all responses before the first result, and nothing is
    generated.

    responses: sample id -> token ids, EOS included, at least one
    Raises KeyError for a sample without a response, AssertionError for two temperatures.
    """
    given = [list(responses[request.sample_id]) for request in requests]
    temperatures = {request.settings.logit_temperature for request in requests}
    assert len(temperatures) <= 1, f"one temperature for all of a batch, not {temperatures}"
    scored = engine.score([request.prompt for request in requests], given, *temperatures)
    for request, tokens, log_probs in zip(requests, given, scored, strict=True):
        reason = FinishReason.of(tokens, request.settings)
        yield GenerationResult(request.place, tokens, log_probs, reason, engine.weights_version)
