"""Decode steps that are captured once and replayed sample what steps launched one by one sample."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mindspeed_rlxf.config.generation_memory import CACHE_SHARE
from mindspeed_rlxf.rollout import decode_graphs, generation
from mindspeed_rlxf.rollout.decode_graphs import padded_rows
from mindspeed_rlxf.rollout.native import NativeRollout
from mindspeed_rlxf.rollout.rollout_engine import GenerationRequest, GenerationResult
from tests.recorded_steps import RecordedSteps
from tests.unit.rollout.test_generation import small_pages
from tests.unit.rollout.test_native import (
    DIM,
    GROUPS,
    TinyModel,
    engine,
    prompts,
    requests,
    settings,
    sizes,
)
from tests.unit.rollout.test_slices import CAPACITIES, assert_same, sliced

__all__ = ["prompts", "sizes", "small_pages"]  # fixtures
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 2.0}
ONES = torch.ones(2)
LENGTHS = (40, 3, 17, 40, 9, 25, 1, 12)


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_graphs, "GraphPool", RecordedSteps)
    RecordedSteps.num_captures = 0


class Relaunched(RecordedSteps):
    """Captures nothing: each step is launched anew, with the same padding."""

    def run_and_capture(self, work: Any) -> Any:
        work()
        return work


def limited(
    prompts: Sequence[np.ndarray], lengths: Sequence[int], **keys: Any
) -> list[GenerationRequest]:
    """Requests for responses of at most these lengths, which an EOS may end earlier."""
    asked = requests(prompts, range(len(lengths)), settings(**SAMPLED | keys))
    pairs = zip(asked, lengths, strict=True)
    return [replace(r, settings=replace(r.settings, max_new_tokens=n)) for r, n in pairs]


def generated(rollout: NativeRollout, asked: Sequence[GenerationRequest]) -> list[GenerationResult]:
    return sorted(rollout.generate(asked), key=lambda result: result.place)


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("rows", [3, 5, 100])
def test_graphs_sample_what_steps_without_them_sample(prompts, monkeypatch, rows, steps):
    """Rows leave and enter, and the cache grows by two tokens.

    Bit by bit as with the same padding. Without padding but for rounding, as a GEMM may add in
    another order for another number of rows.
    """
    asked = limited(prompts, LENGTHS)
    plain = generated(engine(TinyModel(), rows, steps=steps), asked)
    model = TinyModel()
    replayed = generated(engine(model, rows, steps=steps, decode_graphs=True), asked)
    assert_same(replayed, plain)
    assert len({len(result.tokens) for result in plain}) > 4
    num_decoded = len(model.calls)
    monkeypatch.setattr(decode_graphs, "GraphPool", Relaunched)
    model = TinyModel()
    assert generated(engine(model, rows, steps=steps, decode_graphs=True), asked) == replayed
    assert num_decoded < len(model.calls), "no step was replayed"


def test_a_graph_is_captured_once_for_a_number_of_rows(prompts):
    """Prompts and responses of up to 48 tokens have one page of the cache."""
    equal = limited(prompts, [40] * 8, eos_token_ids=())
    generated(engine(TinyModel(), 100, decode_graphs=True), equal)
    assert RecordedSteps.num_captures == 1
    RecordedSteps.num_captures = 0
    # 8 rows, then 6 and 8 in the graph; 4; 2, of which both end at last
    unequal = limited(prompts, [5, 5, 10, 10, 20, 20, 40, 40], eos_token_ids=())
    generated(engine(TinyModel(), 100, decode_graphs=True), unequal)
    assert RecordedSteps.num_captures == 3


def test_rows_are_rounded_up():
    assert [padded_rows(n, 999) for n in (1, 2, 3, 4, 5, 8)] == [1, 2, 4, 4, 8, 8]
    assert [padded_rows(n, 999) for n in (9, 16, 17, 63, 64)] == [16, 16, 24, 64, 64]
    assert [padded_rows(n, 999) for n in (65, 80, 81, 128, 129, 257)] == [80, 80, 96, 128, 160, 320]
    assert [padded_rows(n, 6) for n in (3, 5, 6)] == [4, 6, 6]


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("tokens", [52, 8 * 17])
def test_a_limited_cache_has_room_for_the_padding(prompts, sizes, tokens):
    """17 tokens hold a row: its prompt of up to 8 and a response of 9.

    52 tokens have room for three rows of 12 tokens that get 4 more, but not for four that get 2.
    """
    asked = requests(prompts, range(8), settings(**SAMPLED))
    plain = generated(engine(TinyModel(), 100), asked)
    token = 2 * GROUPS * DIM * 8  # keys and values of one layer, fp64
    memory = int(tokens * token / CACHE_SHARE) + 10
    sizes.tokens = 0
    assert_same(generated(engine(TinyModel(), memory=memory, decode_graphs=True), asked), plain)
    assert sizes.tokens <= tokens


@pytest.mark.usefixtures("small_pages")
def test_a_cache_that_shrinks_has_room_for_what_padding_writes():
    """Three rows with long prompts end first; five with short ones go on in a graph of eight."""
    prompts = [np.array([1 + n]) for n in range(5)] + [np.arange(1, 9)] * 3
    asked = limited(prompts, [12] * 5 + [2] * 3, eos_token_ids=())
    plain = generated(engine(TinyModel(), 100), asked)
    assert_same(generated(engine(TinyModel(), 100, decode_graphs=True), asked), plain)


def test_weights_that_move_between_two_slices_are_read_where_they_are(prompts):
    """After each slice of 3 steps responses are withdrawn and the weights replaced."""

    def run(decode_graphs: bool) -> list[list[int]]:
        rollout = engine(TinyModel(), 3, capacities=CAPACITIES, decode_graphs=decode_graphs)
        rollout.add(limited(prompts, [12] * 8))
        responses: dict[int, list[int]] = {}
        for version in range(1, 40):
            responses |= {result.place: result.tokens for result in rollout.advance(3)}
            unfinished = rollout.withdraw()
            for parameter in rollout.model.parameters():
                parameter.data = parameter.data * 1.1  # elsewhere
            rollout.update_weights(rollout.model.state_dict().items(), version)
            rollout.add(unfinished)
        return [responses[place] for place in range(8)]

    assert run(True) == run(False)
    assert RecordedSteps.num_captures > 4


def test_responses_that_are_withdrawn_go_on_in_graphs(prompts):
    asked = limited(prompts, [12] * 8)
    whole = sliced(engine(TinyModel(), 3), asked, None)
    rollout = engine(TinyModel(), 3, capacities=CAPACITIES, decode_graphs=True)
    assert_same(sliced(rollout, asked, 4, withdraws=True), whole)


def test_rows_with_several_settings_are_decoded_without_graphs(prompts):
    asked = limited(prompts, [9, 3, 5, 9, 7, 4, 9, 2], eos_token_ids=())
    greedy = settings(do_sample=False, eos_token_ids=())
    asked[3] = replace(asked[3], settings=greedy)
    asked[6] = replace(asked[6], settings=greedy)
    plain = generated(engine(TinyModel(), 100), asked)
    assert_same(generated(engine(TinyModel(), 100, decode_graphs=True), asked), plain)
    assert RecordedSteps.num_captures == 0


def test_a_step_that_reads_on_the_host_cannot_be_captured(prompts, monkeypatch):
    draw_tokens = generation.draw_tokens

    def draw_and_read(logits: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        tokens, log_probs = draw_tokens(logits, *rest)
        return tokens if tokens.sum() >= 0 else tokens.clone(), log_probs

    monkeypatch.setattr(generation, "draw_tokens", draw_and_read)
    asked = limited(prompts, LENGTHS)
    assert generated(engine(TinyModel(), 100), asked)
    with pytest.raises(AssertionError, match="_local_scalar_dense"):
        generated(engine(TinyModel(), 100, decode_graphs=True), asked)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x[x > 1],
        lambda x: x.index_put_((x > 1,), x[:1]),
        lambda x: x.nonzero(),
        lambda x: x + torch.tensor([1.0, 2.0, 3.0]),
    ],
    ids=["select by mask", "write by mask", "nonzero", "constant from the host"],
)
def test_the_stand_in_refuses_what_a_device_cannot_capture(read):
    x = torch.arange(3.0)
    with pytest.raises(AssertionError, match="waits"):
        RecordedSteps().run_and_capture(lambda: read(x))


@pytest.mark.parametrize("change", [list.clear, lambda addends: setattr(addends[0], "data", ONES)])
def test_the_stand_in_refuses_a_tensor_that_was_freed_or_moved(change):
    sums, addends = torch.zeros(2), [torch.ones(2)]
    replay = RecordedSteps().run_and_capture(lambda: sums.add_(addends[0]))
    replay()
    assert sums.tolist() == [2, 2]
    change(addends)
    with pytest.raises(AssertionError, match="freed or moved"):
        replay()
