"""Generation that stops after any decode step and goes on is the same generation."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mindspeed_rlxf.config.generation_memory import CACHE_SHARE, Capacities
from mindspeed_rlxf.config.rank_layout import ParallelLayout
from mindspeed_rlxf.config.schema import RolloutConfig
from mindspeed_rlxf.rollout import replica
from mindspeed_rlxf.rollout.native import NativeRollout
from mindspeed_rlxf.rollout.rollout_engine import GenerationRequest, GenerationResult
from tests.unit.rollout.test_generation import small_pages
from tests.unit.rollout.test_native import (
    DIM,
    EOS,
    GROUPS,
    TinyModel,
    engine,
    letter_stops,
    prompts,
    requests,
    settings,
    sizes,
)

__all__ = ["prompts", "sizes", "small_pages"]  # fixtures
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 2.0, "max_new_tokens": 12}
CAPACITIES = Capacities(prompt=8, response=12, samples=8)


def sliced(
    rollout: NativeRollout,
    asked: Sequence[GenerationRequest],
    steps: int | None,
    withdraws: bool = False,
    later: Sequence[GenerationRequest] = (),
) -> list[GenerationResult]:
    """Results by place; `later` are added after the first slice, a point follows each slice."""
    found: dict[int, GenerationResult] = {}
    num_slices = 0
    rollout.add(asked)
    while len(found) < len(asked) + len(later):
        found |= {result.place: result for result in rollout.advance(steps)}
        num_slices += 1
        if withdraws:
            rollout.add(rollout.withdraw())
        if num_slices == 1:
            rollout.add(later)
        assert num_slices < 40
    return [found[place] for place in sorted(found)]


def assert_same(ours: list[GenerationResult], theirs: list[GenerationResult]) -> None:
    """The same tokens and reasons, and log-probs but for rounding."""
    for one, other in zip(ours, theirs, strict=True):
        assert (one.tokens, one.finish_reason) == (other.tokens, other.finish_reason)
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-6)


@pytest.mark.parametrize("steps", [1, 3])  # that the host launches at once
@pytest.mark.parametrize(
    "keys", [{}, {"stop": letter_stops("cd", "gg", "ib", "e"), "eos_token_ids": ()}]
)
def test_slices_of_any_length_sample_what_one_call_samples(prompts, keys, steps):
    asked = requests(prompts, range(8), settings(**SAMPLED, **keys))
    whole = sliced(engine(TinyModel(), 3, steps=steps), asked, None)
    assert len({len(result.tokens) for result in whole}) > 2
    for slice_steps in (1, 2, 5):
        model = TinyModel()
        rollout = engine(model, 3, steps=steps, capacities=CAPACITIES)
        assert_same(sliced(rollout, asked, slice_steps, later=asked[8:]), whole)
        if not keys and steps == 1:  # to the bit, as the batch is the same at every step
            as_whole = engine(TinyModel(), 3, capacities=CAPACITIES)
            assert sliced(rollout, asked, slice_steps) == sliced(as_whole, asked, None)
        late = engine(TinyModel(), 3, steps=steps, capacities=CAPACITIES)
        assert_same(sliced(late, asked[:5], slice_steps, later=asked[5:]), whole)


@pytest.mark.parametrize(
    "keys", [{}, {"stop": letter_stops("cd", "gg", "ib", "e"), "eos_token_ids": ()}]
)
@pytest.mark.parametrize("slice_steps", [1, 4])
def test_responses_that_are_withdrawn_at_every_border_go_on_as_if_they_were_not(
    prompts, keys, slice_steps
):
    asked = requests(prompts, range(8), settings(**SAMPLED, **keys))
    whole = sliced(engine(TinyModel(), 3), asked, None)
    rollout = engine(TinyModel(), 3, capacities=CAPACITIES)
    assert_same(sliced(rollout, asked, slice_steps, withdraws=True), whole)


def test_a_slice_is_a_number_of_decode_steps_and_counts_no_prefill(prompts, sizes):
    asked = requests(prompts, range(8), settings(**SAMPLED | {"eos_token_ids": ()}))
    rollout = engine(TinyModel(), 3, steps=4, capacities=CAPACITIES)
    rollout.add(asked)
    num_decoded = []
    for steps in (0, 6, 1, 16):  # the last one ends the first three rows, and goes on with others
        sizes.decoded = []
        list(rollout.advance(steps))
        num_decoded.append(len(sizes.decoded))
    assert num_decoded == [0, 6, 1, 16]
    assert rollout.stats().sampled_tokens > rollout.stats().decoded_tokens > 2 * 16


@pytest.mark.usefixtures("small_pages")
def test_withdrawn_requests_come_in_the_order_they_were_added_with_their_parts(prompts):
    token = 2 * GROUPS * DIM * 8  # keys and values of one layer, fp64
    rollout = engine(TinyModel(), memory=int(60 * token / CACHE_SHARE) + 10, capacities=CAPACITIES)
    keys = SAMPLED | {"eos_token_ids": ()}
    asked = requests(prompts, range(70, 78), settings(**keys))
    whole = sliced(engine(TinyModel(), 3), asked, None)
    rollout.add(asked[:6])
    list(rollout.advance(10))  # rows wait for room in the cache, one of them with a part
    rollout.add(asked[6:])
    parts = rollout.withdraw()
    assert [request.sample_id for request in parts] == list(range(70, 78))
    num_begun = [len(request.begun.tokens) if request.begun else 0 for request in parts]
    assert len(set(num_begun)) > 2 and num_begun[6:] == [0, 0]
    for request, result, count in zip(parts, whole, num_begun, strict=True):
        if request.begun is not None:
            assert request.begun.tokens == result.tokens[:count]
            assert request.begun.log_probs == pytest.approx(result.log_probs[:count], abs=1e-6)
    assert rollout.withdraw() == []
    assert_same(sliced(rollout, parts, 3), whole)


def test_every_token_has_the_version_of_the_weights_that_sampled_it(prompts):
    rollout = engine(TinyModel(), 3, capacities=CAPACITIES)
    asked = requests(prompts[:2], range(2), settings(**SAMPLED | {"eos_token_ids": ()}))
    rollout.add(asked[:1])
    list(rollout.advance(4))  # 5 tokens, as the prefill draws the first
    for version, steps in ((3, 2), (4, None)):
        parts = rollout.withdraw()
        rollout.update_weights(TinyModel().state_dict().items(), version)
        rollout.add(parts)
        ended = list(rollout.advance(steps))
    (result,) = ended
    assert result.versions == [0] * 5 + [3] * 3 + [4] * 4 and result.weights_version == 4
    assert next(rollout.generate(asked[1:])).versions == [4] * 12


def test_after_a_point_nothing_depends_on_what_was_computed_before_it(prompts):
    """A cache, or states of prompts, kept over a point would be those of other weights."""
    keys = settings(**SAMPLED | {"eos_token_ids": ()})
    # One row at a time, so that the state of the prompt that they share is kept for the others.
    asked = requests([prompts[1]] * 3, range(3), keys)
    changed = TinyModel()
    with torch.no_grad():
        changed.qkv.mul_(1.5)
    kept = engine(TinyModel(), 1, capacities=CAPACITIES)
    kept.add(asked)
    list(kept.advance(3))
    parts = kept.withdraw()
    kept.update_weights(changed.state_dict().items(), 1)
    kept.add(parts)
    fresh = engine(changed, 1, capacities=CAPACITIES)
    fresh.update_weights(changed.state_dict().items(), 1)
    fresh.add(parts)
    assert list(kept.advance(None)) == list(fresh.advance(None))
    assert kept.stats() == fresh.stats()
    assert kept.stats().prompt_tokens > len(prompts[1]) + 4, "prompt and part are computed again"


def test_weights_that_change_under_unfinished_responses_end_the_run(prompts):
    rollout = engine(TinyModel(), 3, capacities=CAPACITIES)
    rollout.add(requests(prompts, range(8), settings(**SAMPLED)))
    list(rollout.advance(1))
    rollout.update_weights(TinyModel().state_dict().items(), 1)
    with pytest.raises(AssertionError, match="weights changed during a generation"):
        list(rollout.advance(1))


def test_a_generation_that_ended_leaves_no_trace_in_the_next(prompts):
    """As a validation between two points would: the cache would have another capacity."""
    asked = requests(prompts, range(8), settings(**SAMPLED))
    used = engine(TinyModel(), 3, capacities=CAPACITIES)
    list(used.generate(requests([np.arange(1, 9)] * 3, range(3), asked[0].settings)))
    unused = engine(TinyModel(), 3, capacities=CAPACITIES)
    assert sliced(used, asked, 2) == sliced(unused, asked, 2)


def test_without_capacities_requests_are_not_added_to_unfinished_ones(prompts):
    asked = requests(prompts, range(8), settings(**SAMPLED))
    rollout = engine(TinyModel(), 3)
    rollout.add([replace(asked[0], settings=settings(max_new_tokens=9, eos_token_ids=(EOS,)))])
    list(rollout.advance(0))
    with pytest.raises(AssertionError, match="capacities"):
        rollout.add(asked[1:])


@pytest.mark.parametrize(
    ("staleness", "lead", "replicas", "samples"), [(1, 1, 1, 12), (3, 1, 2, 20), (3, 0, 5, 12)]
)
def test_capacities_are_those_of_the_configuration(staleness, lead, replicas, samples):
    """K - lead + 1 batches of 3 prompts with 4 samples are under way; a prompt is not shared."""
    config: Any = SimpleNamespace(
        rollout=RolloutConfig(max_staleness=staleness),
        lead=lead,
        training=SimpleNamespace(global_batch_size=3),
        actor_rollout=SimpleNamespace(
            max_prompt_length=8, max_new_tokens=12, n_samples_per_prompt=4
        ),
        rollout_layout=ParallelLayout(replicas, 1),
    )
    assert replica.find_capacities(config) == Capacities(8, 12, samples)
    config.rollout = RolloutConfig()
    assert replica.find_capacities(config) is None, "those of the requests at hand"
