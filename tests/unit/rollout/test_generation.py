"""Rows that share prompts, are set back or are computed beyond their end change no response."""

from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from mindspeed_rlxf.config import generation_memory
from mindspeed_rlxf.rollout import generation, kv_cache, prefixes
from mindspeed_rlxf.rollout.rollout_engine import Begun
from tests.unit.rollout.test_native import (
    DIM,
    GROUPS,
    VOCAB,
    TinyModel,
    answers,
    engine,
    prompts,
    requests,
    settings,
    sizes,
)

__all__ = ["prompts", "sizes"]  # fixtures
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 2.0}


def same(
    found: tuple[list[list[int]], list[list[float]]],
    expected: tuple[list[list[int]], list[list[float]]],
) -> None:
    """The same tokens, and log-probs but for rounding."""
    assert found[0] == expected[0]
    for ours, theirs in zip(found[1], expected[1], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6)


@pytest.mark.parametrize("steps", [1, 3, 50])
@pytest.mark.parametrize("rows", [1, 3, 100])
def test_responses_do_not_depend_on_rows_and_looks_of_the_host(prompts, sizes, steps, rows):
    expected = answers(engine(TinyModel(), 2), prompts, **SAMPLED)
    sizes.decoded = []
    answers(engine(TinyModel(), rows), prompts, **SAMPLED)
    often, sizes.decoded = len(sizes.decoded), []
    model = TinyModel()
    late = engine(model, rows, steps=steps)
    same(answers(late, prompts, **SAMPLED), expected)
    produced, given, stats = sum(map(len, expected[0])), sum(map(len, prompts)), late.stats()
    assert (stats.sampled_tokens, stats.prompt_tokens) == (produced, given)
    assert stats.decoded_tokens == produced - len(prompts)  # the last token is never run
    assert steps > 1 or sum(model.calls) == given + stats.decoded_tokens
    # Rows that have ended are computed on, so that refills come later.
    assert rows == 100 or steps == 1 or len(sizes.decoded) > often


@pytest.mark.parametrize(("rows", "computed"), [(100, 8 + 5), (3, 8 + 5 + 8), (1, 6 * 8 + 2 * 5)])
def test_samples_of_a_prompt_share_its_prefill(prompts, rows, computed):
    """Unless no row of the prompt is left when the next begins; prompts of 8 and 5 tokens."""
    one, other = prompts[1], prompts[3]
    asked = [one, one, one, other, one, one, other, one]
    expected = [answers(engine(TinyModel(), 1), [p], [i], **SAMPLED) for i, p in enumerate(asked)]
    model = TinyModel()
    rollout = engine(model, rows)
    found = answers(rollout, asked, **SAMPLED)
    same(found, ([t[0] for t, _ in expected], [logs[0] for _, logs in expected]))
    assert len({tuple(tokens) for tokens in found[0]}) > 4
    assert rollout.stats().prompt_tokens == computed


@pytest.mark.parametrize("rows", [100, 3])
def test_responses_that_go_on_share_the_prefill_of_their_prompt(prompts, rows):
    """Also with a response that begins, and where some of the prompt's rows enter later."""
    prompt = prompts[1]
    asked = requests([prompt] * 6, range(6), settings(**SAMPLED))
    for place, length in enumerate([0, 4, 0, 2, 4, 3]):
        if length > 0:
            begun = Begun([3, 1, 4, 2][:length], [-0.5] * length, [0] * length)
            asked[place] = replace(asked[place], begun=begun)
    alone = [next(engine(TinyModel(), 1).generate([request])) for request in asked]
    rollout = engine(TinyModel(), rows)
    found = sorted(rollout.generate(asked), key=lambda result: result.place)
    for ours, theirs in zip(found, alone, strict=True):
        assert ours.tokens == theirs.tokens
        assert ours.log_probs == pytest.approx(theirs.log_probs, abs=1e-6)
    # The first row's prompt serves all: each costs the tokens of its response so far.
    assert rollout.stats().prompt_tokens == len(prompt) + 4 + 2 + 4 + 3


def test_prompts_that_begin_alike_compute_the_beginning_once(monkeypatch):
    """In blocks of two tokens, and if it is half of a row or more."""
    monkeypatch.setattr(prefixes, "BLOCK", 2)
    begin = [3, 1, 4, 1, 5]
    ends = [[9], [2, 6], [9], [2, 7], [5, 3, 5, 8, 9]]
    asked = requests([np.array(begin + end) for end in ends], range(5), settings(**SAMPLED))
    asked[2] = replace(asked[2], begun=Begun([3, 1], [-0.5] * 2, [0] * 2))
    alone = [next(engine(TinyModel(), 1).generate([request])) for request in asked]
    rollout = engine(TinyModel(), 100)
    found = sorted(rollout.generate(asked), key=lambda result: result.place)
    for ours, theirs in zip(found, alone, strict=True):
        assert ours.tokens == theirs.tokens
        assert ours.log_probs == pytest.approx(theirs.log_probs, abs=1e-6)
    # The second copies 4 tokens, the third its prompt of 6, the fourth 6 of the second's. The
    # fifth shares 4 of 10.
    assert rollout.stats().prompt_tokens == 6 + 3 + 2 + 1 + 10


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (generation_memory, kv_cache):
        monkeypatch.setattr(module, "PAGE", 2)
    monkeypatch.setattr(generation, "GROWTH", 4)


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("tokens", [10, 17, 40, 8 * 17])
def test_samples_wait_where_the_cache_is_full_and_go_on_as_before(prompts, sizes, steps, tokens):
    """17 tokens hold one row: its prompt of up to 8 and a response of 9; there are 8 rows.

    One row has a cache in any case.
    """
    expected = answers(engine(TinyModel(), 1), prompts, **SAMPLED)
    token = 2 * GROUPS * DIM * 8  # keys and values of one layer, fp64
    bytes_of_all = int(tokens * token / generation_memory.CACHE_SHARE) + 10
    sizes.tokens = sizes.num_rows = 0
    rollout = engine(TinyModel(), memory=bytes_of_all, steps=steps)
    same(answers(rollout, prompts, **SAMPLED), expected)
    assert sizes.tokens <= max(tokens, 17)
    again = rollout.stats().prompt_tokens - sum(map(len, prompts))
    assert (sizes.num_rows == 1) == (tokens <= 17)
    assert (again > 0) == (tokens == 40), "some waited, and their tokens were computed again"
    assert rollout.stats().sampled_tokens == sum(map(len, expected[0]))


def test_a_device_is_asked_once_in_some_steps(prompts, monkeypatch):
    look = MagicMock(side_effect=generation.RowStates.read_progress, autospec=True)
    monkeypatch.setattr(generation.RowStates, "read_progress", lambda *at: look(*at))
    keys = {"max_new_tokens": 9, "eos_token_ids": ()}
    answers(engine(TinyModel(), 100, steps=4), prompts, **keys)
    assert look.call_count == 3  # after the prefill, which draws the first token, and twice 4 more


def test_logits_that_are_no_numbers_end_the_generation(prompts):
    model = TinyModel()
    model.output_weight.data[3] = torch.nan
    with pytest.raises(FloatingPointError, match="must be numbers"):
        answers(engine(model, 3), prompts, **SAMPLED)


def test_rows_are_refilled_together(prompts, monkeypatch):
    """At least 1 in REFILLED of the rows, while others grow; the last ones as they are."""
    model = TinyModel()
    entered: list[int] = []
    begin = generation.RowStates.set_up

    def counted(self: generation.RowStates, first: int, rows: Any) -> None:
        entered.append(len(rows))
        begin(self, first, rows)

    monkeypatch.setattr(generation.RowStates, "set_up", counted)
    monkeypatch.setattr(generation, "REFILLED", 2)
    many: list[np.ndarray] = [np.array([1 + i % (VOCAB - 1)]) for i in range(19)]
    found: list[list[int]] = answers(engine(model, 4), many, **SAMPLED)[0]
    assert len(found) == 19 and sum(entered) == 19 and entered[0] == 4
    assert all(count >= 2 for count in entered[:-1]) and max(entered[1:]) < 5


def test_rows_of_other_settings_draw_as_they_would_alone(prompts):
    kinds: list[dict[str, Any]] = [
        {**SAMPLED, "eos_token_ids": (4, 7)},
        {"do_sample": False, "max_new_tokens": 5},
        {**SAMPLED, "top_p": 0.8, "min_new_tokens": 3, "max_new_tokens": 6},
    ]
    expected = [answers(engine(TinyModel(), 3), prompts, **keys) for keys in kinds]
    ids = range(len(prompts))
    asked = [requests(prompts, ids, settings(**kinds[i % 3]))[i] for i in ids]
    found = sorted(engine(TinyModel(), 5, steps=3).generate(asked), key=lambda row: row.place)
    same(
        ([row.tokens for row in found], [row.log_probs for row in found]),
        ([expected[i % 3][0][i] for i in ids], [expected[i % 3][1][i] for i in ids]),
    )
