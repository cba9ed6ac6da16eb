"""A turn of a conversation is the rest of a row that has begun: its own stops and minimum."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mindspeed_rlxf.config.generation_memory import Capacities
from mindspeed_rlxf.rollout.rollout_engine import (
    Begun,
    FinishReason,
    GenerationRequest,
    GenerationResult,
)
from mindspeed_rlxf.rollout.whole_responses import WholeResponses
from tests.unit.rollout.test_native import EOS, SEED, TinyModel, engine, letter_stops, settings

PROMPT = np.array([3, 1, 4])
EARLIER = [5, EOS, 9, 2]  # a turn that an EOS ended, and an observation


def turn(earlier: list[int] = EARLIER, drawn: int = 0, **keys: Any) -> GenerationRequest:
    """The request for a turn behind `earlier`, the last `drawn` tokens of which are its own."""
    begun = Begun(list(earlier), [-0.5] * len(earlier), [0] * len(earlier))
    wanted = settings(**{"do_sample": True, "temperature": 2.0, "max_new_tokens": 20} | keys)
    return GenerationRequest(0, 7, PROMPT, wanted, SEED, begun, len(earlier) - drawn)


def sample(request: GenerationRequest, steps: int | None = None) -> Any:
    """Sample a turn; with `steps` leave the engine after every that many."""
    native = engine(TinyModel(), 3)
    while True:
        native.add([request])
        found = list(native.advance(steps))
        if found:
            return found[0]
        (request,) = native.withdraw()


@pytest.mark.parametrize("steps", [None, 1, 3])
def test_the_least_number_of_tokens_is_of_the_turn(steps: int | None) -> None:
    """Also of a turn that goes on after its engine was left."""
    every_id = tuple(range(11))
    for least in (1, 3, 4):
        keys = {"min_new_tokens": least, "eos_token_ids": every_id[:-1], "max_new_tokens": 20}
        found = sample(turn(**keys), steps)
        own = found.tokens[len(EARLIER) :]
        assert own[:least] == [10] * least, "only the id that is no EOS is allowed"
        assert len(own) > least or found.tokens[-1] == 10
    short = sample(turn(min_new_tokens=3, max_new_tokens=len(EARLIER) + 2, eos_token_ids=(EOS,)))
    assert len(short.tokens) == len(EARLIER) + 2
    assert short.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("steps", [1, 2])
def test_a_turn_that_is_left_and_entered_again_goes_on(steps: int) -> None:
    stop = letter_stops("jk", "hh")
    whole = sample(turn(stop=stop))
    parts = sample(turn(stop=stop), steps)
    assert parts.tokens == whole.tokens and parts.finish_reason is whole.finish_reason
    assert parts.token_versions == whole.token_versions


def test_a_stop_string_does_not_begin_in_an_earlier_turn() -> None:
    """The turn's first token would complete it with the last one before the turn."""
    greedy = sample(turn(do_sample=False))
    first = greedy.tokens[len(EARLIER)]
    letters = "abcdefghijk"
    across = letter_stops(letters[EARLIER[-1]] + letters[first])
    found = sample(turn(do_sample=False, stop=across))
    assert found.tokens == greedy.tokens


class OneToken:
    """Each turn is the token 7."""

    def __init__(self) -> None:
        self.asked: list[GenerationRequest] = []

    def generate(self, asked: Any) -> Any:
        self.asked += asked
        for request in asked:
            yield GenerationResult(request.place, [7], [-0.25], FinishReason.STOP, 4)


def test_an_engine_of_whole_responses_gets_earlier_turns_as_its_prompt() -> None:
    whole: Any = OneToken()
    rollout = WholeResponses(whole)
    request = turn(max_new_tokens=9)
    rollout.add([request, replace(request, place=1, begun=None, turn_start=0)])
    first, second = rollout.advance(1)
    assert first.tokens == [*EARLIER, 7] and first.token_versions == [0] * 4 + [4]
    assert first.log_probs == [-0.5] * 4 + [-0.25] and second.tokens == [7]
    asked = whole.asked[0]
    assert asked.prompt.tolist() == [*PROMPT, *EARLIER] and asked.begun is None
    assert asked.settings.max_new_tokens == 5 and asked.turn_start == 4


@pytest.mark.parametrize("change", ["nothing", "weights", "another row", "no room", "full"])
def test_a_turn_computes_only_what_follows_the_turn_before(change: str) -> None:
    """Unless weights changed, the row is another one, or memory is needed, then or later."""
    native = engine(TinyModel(), 2, capacities=Capacities(prompt=9, response=20, samples=4))
    first = replace(turn(), begun=None, turn_start=0, is_turn=True)
    first = replace(first, settings=replace(first.settings, max_new_tokens=4))
    others = [replace(first, sample_id=n, place=n, prompt=np.array([2, 7, n])) for n in (8, 9)]
    native.add([first, *others[: change == "full"]])
    ended, *_ = sorted(native.advance(None), key=lambda result: result.place)
    assert len(native._kept_rows) == (0 if change == "full" else 1)
    if change == "weights":
        native.update_weights(TinyModel().state_dict().items(), 1)
    elif change == "no room":
        native.add(others)
        list(native.advance(None))
    earlier = [*ended.tokens, 9, 2]
    if change == "another row":
        earlier[0] = (earlier[0] + 1) % 11
    request = turn(earlier)
    native.add([request])
    (second,) = native.advance(None)
    num_begun = len(PROMPT) + len(earlier)
    # The last token of a turn was drawn, but not computed: it and the observation of 2 follow.
    assert native.stats().prompt_tokens == (3 if change == "nothing" else num_begun)
    alone = sample(request)
    assert second.tokens == alone.tokens
    assert second.log_probs == pytest.approx(alone.log_probs, abs=1e-6)
