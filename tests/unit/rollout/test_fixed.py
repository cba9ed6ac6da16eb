"""Given responses behind the protocol of an engine."""

from __future__ import annotations

import numpy as np
import pytest

from mindspeed_rlxf.rollout.fixed import FixedResponsesEngine
from mindspeed_rlxf.rollout.protocol import FinishReason, RolloutEngine
from tests.unit.rollout.test_native import EOS, TinyModel, engine, requests, settings

TEMPERATURE = 2.0


@pytest.fixture
def prompts() -> list[np.ndarray]:
    return [np.array(ids) for ids in ([3, 1, 4], [1, 5], [9])]


def test_given_responses_come_back_with_what_generating_them_reports(
    prompts: list[np.ndarray],
) -> None:
    inner = engine(TinyModel(), 2)
    ids, wanted = [70, 50, 60], settings(do_sample=True, temperature=TEMPERATURE)
    asked = requests(prompts, ids, wanted)
    generated = {result.place: result for result in inner.generate(asked)}
    inner.update_weights(TinyModel().state_dict().items(), 7)
    responses = {ids[place]: result.tokens for place, result in generated.items()}
    fixed: RolloutEngine = FixedResponsesEngine(inner, responses)
    for result in fixed.generate(asked):
        expected = generated[result.place]
        assert result.tokens == expected.tokens
        assert result.finish_reason is expected.finish_reason
        assert result.log_probs == pytest.approx(expected.log_probs, abs=1e-5)
        assert result.weights_version == 7 == fixed.weights_version
    # nothing is generated
    assert fixed.stats().decoded_tokens == fixed.stats().sampled_tokens == 0
    assert fixed.stats().prompt_tokens > 0


def test_a_response_has_stopped_only_with_an_eos(prompts: list[np.ndarray]) -> None:
    given = {0: [5, EOS], 1: [5, 6], 2: [EOS]}
    fixed = FixedResponsesEngine(engine(TinyModel(), 2), given)
    found = {
        r.place: r.finish_reason for r in fixed.generate(requests(prompts, range(3), settings()))
    }
    assert found == {0: FinishReason.STOP, 1: FinishReason.LENGTH, 2: FinishReason.STOP}
    with pytest.raises(KeyError):
        next(fixed.generate(requests(prompts, range(1, 4), settings())))


def test_sleep_and_weights_are_those_of_the_engine_behind(prompts: list[np.ndarray]) -> None:
    inner = engine(TinyModel(), 2)
    fixed = FixedResponsesEngine(inner, {0: [5], 1: [6], 2: [7]})
    asked = requests(prompts, range(3), settings())
    before = [result.log_probs for result in fixed.generate(asked)]
    state = TinyModel().state_dict()
    fixed.update_weights(((name, tensor * 2) for name, tensor in state.items()), 1)
    assert [result.log_probs for result in fixed.generate(asked)] != before
    fixed.sleep()
    with pytest.raises(AssertionError, match="sleeps"):
        next(fixed.generate(asked))
    fixed.wake()
    assert fixed.score(prompts, [[5], [6], [7]]) == [r.log_probs for r in fixed.generate(asked)]
