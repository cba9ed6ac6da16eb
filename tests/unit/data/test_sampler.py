"""Every epoch shows every prompt once, and a saved position continues the same stream."""

import json

import pytest
from hypothesis import given, settings, strategies as st

from mindspeed_rlxf.data.sampler import MixtureSampler, PromptSampler, make_sampler

sizes = st.integers(1, 40)
seeds = st.integers(0, 2**40)


def take(sampler: PromptSampler, num_batches: int) -> list[int]:
    return [index for _ in range(num_batches) for index in sampler.next_batch()]


@settings(deadline=None)  # a busy machine is no failure
@given(sizes, sizes, seeds, st.booleans(), st.integers(1, 30))
def test_every_epoch_shows_every_row_once(num_prompts, batch_size, seed, shuffle, num_batches):
    stream = take(PromptSampler(num_prompts, batch_size, seed, shuffle), num_batches)
    assert len(stream) == num_batches * batch_size  # every batch is full
    for start in range(0, len(stream), num_prompts):
        epoch = stream[start : start + num_prompts]
        assert len(set(epoch)) == len(epoch)
        if len(epoch) == num_prompts:
            assert set(epoch) == set(range(num_prompts))


def test_epochs_and_seeds_have_their_own_order():
    stream = take(PromptSampler(50, 50, 1, True), 2)
    assert stream[:50] != stream[50:]
    assert stream[:50] != take(PromptSampler(50, 50, 2, True), 1)
    assert stream == take(PromptSampler(50, 50, 1, True), 2)


weights = st.lists(st.floats(0.01, 100), min_size=1, max_size=4)


@settings(deadline=None)  # a busy machine is no failure
@given(weights, sizes, seeds, st.booleans(), st.integers(1, 20))
def test_every_source_gets_its_share_within_one_prompt(shares, batch_size, seed, shuffle, batches):
    counts = [3 + 2 * i for i in range(len(shares))]
    stream = take(MixtureSampler(counts, shares, batch_size, seed, shuffle), batches)
    starts = [sum(counts[:i]) for i in range(len(counts))]
    for start, size, weight in zip(starts, counts, shares, strict=True):
        own = [index - start for index in stream if start <= index < start + size]
        assert abs(len(own) - weight / sum(shares) * len(stream)) < len(shares)
        assert len(own) <= weight / sum(shares) * len(stream) + 1
        for epoch in range(0, len(own) - size + 1, size):  # its own epochs
            assert set(own[epoch : epoch + size]) == set(range(size))


@settings(deadline=None)  # a busy machine is no failure
@given(weights, sizes, seeds, st.booleans(), st.integers(0, 20), sizes)
def test_a_saved_position_continues_the_same_stream(
    shares, batch_size, seed, shuffle, num_before, new_batch_size
):
    """Through JSON, within epochs, and also with another batch size; one source is no mixture."""
    counts = [3 + 4 * i for i in range(len(shares))]
    shares = shares if len(shares) > 1 else []
    unbroken = make_sampler(counts, shares, batch_size, seed, shuffle)
    take(unbroken, num_before)
    state = json.loads(json.dumps(unbroken.state_dict()))
    resumed = make_sampler(counts, shares, new_batch_size, seed, shuffle)
    take(resumed, 3)
    resumed.load_state_dict(state)
    length = 60  # across the ends of epochs
    expected = take(unbroken, -(-length // batch_size))[:length]
    assert take(resumed, -(-length // new_batch_size))[:length] == expected


SINGLE, MIXED = PromptSampler(9, 2, 7, True), MixtureSampler([4, 5], [1, 2], 2, 7, True)


@pytest.mark.parametrize(
    ("saved", "other", "said"),
    [
        (SINGLE, PromptSampler(10, 2, 7, True), "of the saved run"),
        (SINGLE, PromptSampler(9, 2, 8, True), "of the saved run"),
        (SINGLE, PromptSampler(9, 2, 7, False), "of the saved run"),
        (MIXED, MixtureSampler([4, 5], [1, 3], 2, 7, True), "of the saved run"),
        (MIXED, MixtureSampler([4, 6], [1, 2], 2, 7, True), "of the saved run"),
        (MIXED, SINGLE, "use the num_prompts of the saved run"),
        (SINGLE, MIXED, "use the train_weights of the saved run"),
    ],
)
def test_a_state_of_another_stream_is_refused(saved, other, said):
    with pytest.raises(ValueError, match=said):
        other.load_state_dict(saved.state_dict())
