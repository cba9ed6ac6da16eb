"""Indices into packed and padded micro-batches, checked by the tokens at these indices."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mindspeed_rlxf.data.batch import Rollouts
from mindspeed_rlxf.engine.micro_batch import MicroBatch, make_micro_batches
from mindspeed_rlxf.models.attention import PackedSequences
from tests.rows import length_mask, made_rollouts

CPU = torch.device("cpu")
Lengths = list[tuple[int, int]]  # (prompt, response) of each row


def token(row: int, place: int) -> int:
    """A number of its own for each token; 0 is padding."""
    return 1 + 100 * row + place


def rollouts_of(lengths: Lengths, trained: Tensor | None = None) -> Rollouts:
    rows = range(len(lengths))
    prompts = [torch.tensor([token(r, i) for i in range(lengths[r][0])]) for r in rows]
    responses = [
        torch.tensor([token(r, sum(lengths[r][:1]) + i) for i in range(lengths[r][1])])
        for r in rows
    ]
    response_ids = pad_sequence(responses, batch_first=True)
    return made_rollouts(
        prompt_ids=pad_sequence(prompts, batch_first=True),
        prompt_lengths=torch.tensor([p for p, _ in lengths]),
        response_ids=response_ids,
        response_mask=length_mask(torch.tensor([r for _, r in lengths]), response_ids.size(1)),
        trained_mask=trained,
        has_eos=torch.ones(len(lengths), dtype=torch.bool),
    )


def hidden_order(batch: MicroBatch) -> Tensor:
    """The tokens in the order of flattened hidden states, [s, b, hidden] -> [s * b, hidden]."""
    return batch.token_ids.t().flatten()


a_batch = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(lengths=a_batch, packed=st.booleans(), multiple=st.sampled_from([1, 2, 4]), data=st.data())
def test_places_point_at_the_tokens_meant(
    lengths: Lengths, packed: bool, multiple: int, data: st.DataObject
) -> None:
    rows = data.draw(st.permutations(range(len(lengths))))[: data.draw(st.integers(1, 5))]
    (batch,) = make_micro_batches(rollouts_of(lengths), [rows], packed, multiple, CPU)
    flat = hidden_order(batch)
    assert flat.numel() % multiple == 0

    before, last, slots = [], [], []
    for row in rows:
        prompt, response = lengths[row]
        # response token t is predicted at the token before it; one slot more is the last token's
        before += [token(row, prompt - 1 + t) for t in range(response)]
        slots += [token(row, prompt - 1 + t) for t in range(response + 1)]
        last.append(token(row, prompt + response - 1))
    assert flat[batch.prediction_places(batch.trained_mask)].tolist() == before
    one_more = length_mask(batch.response_lengths + 1, batch.trained_mask.size(1) + 1)
    assert flat[batch.prediction_places(one_more)].tolist() == slots
    assert flat[batch.last_places()].tolist() == last
    assert [int(t) + 1 for t in before] == batch.trained_ids.tolist()


def test_tokens_that_are_not_learnt_from_are_computed_and_not_read() -> None:
    # response of four tokens after a prompt of two; the second and third were given to the policy
    trained = torch.tensor([[True, False, False, True]])
    (batch,) = make_micro_batches(rollouts_of([(2, 4)], trained), [[0]], True, 1, CPU)
    assert batch.token_ids.tolist() == [[1, 2, 3, 4, 5, 6]]
    assert hidden_order(batch)[batch.prediction_places(batch.trained_mask)].tolist() == [2, 5]
    assert batch.trained_ids.tolist() == [3, 6]


def test_packed_rows_lie_end_to_end_with_positions_of_their_own() -> None:
    (batch,) = make_micro_batches(rollouts_of([(2, 1), (1, 3)]), [[1, 0]], True, 1, CPU)
    assert batch.token_ids.tolist() == [[101, 102, 103, 104, 1, 2, 3]]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert isinstance(batch.attend, PackedSequences) and batch.attend.lengths == (4, 3)
    assert batch.rows == [1, 0] and batch.prompt_lengths.tolist() == [1, 2]


def test_packed_fill_is_a_sequence_of_its_own() -> None:
    (batch,) = make_micro_batches(rollouts_of([(2, 1), (1, 1)]), [[0, 1]], True, 4, CPU)
    assert batch.token_ids.shape == (1, 8)
    assert isinstance(batch.attend, PackedSequences) and batch.attend.lengths == (3, 2, 3)
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]


@pytest.mark.parametrize(("multiple", "width"), [(1, 5), (2, 6), (4, 8)])
def test_padded_rows_are_filled_to_the_longest_and_a_multiple(multiple: int, width: int) -> None:
    (batch,) = make_micro_batches(rollouts_of([(2, 3), (1, 1)]), [[0, 1]], False, multiple, CPU)
    assert batch.token_ids.shape == (2, width) and batch.attend is None
    assert batch.token_ids[1].tolist() == [101, 102] + [0] * (width - 2)
    assert batch.positions.tolist() == list(range(width))
