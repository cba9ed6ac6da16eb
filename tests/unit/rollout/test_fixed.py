"""Fixed responses are returned in the form of an engine's results."""

import numpy as np
import pytest

from mindspeed_rlxf.rollout.rollout_engine import FinishReason, answer_from_table
from tests.unit.rollout.test_native import EOS, TinyModel, engine, requests, settings

PROMPTS = [np.array(ids) for ids in ([3, 1, 4], [1, 5], [9])]


def test_given_responses_come_back_with_what_generating_them_reports() -> None:
    inner = engine(TinyModel(), 2)
    ids, wanted = [70, 50, 60], settings(do_sample=True, temperature=2.0)
    asked = requests(PROMPTS, ids, wanted)
    generated = {result.place: result for result in inner.generate(asked)}
    inner.update_weights(TinyModel().state_dict().items(), 7)
    responses = {ids[place]: result.tokens for place, result in generated.items()}
    for result in answer_from_table(inner, responses, asked):
        expected = generated[result.place]
        assert result.tokens == expected.tokens
        assert result.finish_reason is expected.finish_reason
        assert result.log_probs == pytest.approx(expected.log_probs, abs=1e-5)
        assert result.weights_version == 7
    stats = inner.stats()
    assert stats.decoded_tokens == stats.sampled_tokens == 0, "nothing is generated"
    assert stats.prompt_tokens > 0


def test_a_response_has_stopped_only_with_an_eos() -> None:
    given, inner = {0: [5, EOS], 1: [5, 6], 2: [EOS]}, engine(TinyModel(), 2)
    found = answer_from_table(inner, given, requests(PROMPTS, range(3), settings()))
    reasons = {result.place: result.finish_reason for result in found}
    assert reasons == {0: FinishReason.STOP, 1: FinishReason.LENGTH, 2: FinishReason.STOP}
    with pytest.raises(KeyError):
        next(answer_from_table(inner, given, requests(PROMPTS, range(1, 4), settings())))
