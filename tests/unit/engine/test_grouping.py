"""Rows that share a micro-batch: every row once, within the limit, as many groups."""

from itertools import chain

from hypothesis import given, strategies as st

from mindspeed_rlxf.config.schema import RoleConfig
from mindspeed_rlxf.engine.micro_batch import (
    bring_together,
    group_by_tokens,
    group_padded,
    pack_by_tokens,
    saved_tokens,
    split_groups,
)
from mindspeed_rlxf.ops.planning.stage_memory import micro_batch_tokens, micro_batches

LIMIT = 12
lengths_of_rows = st.lists(st.integers(1, LIMIT), min_size=1, max_size=30)


def test_a_group_is_closed_when_the_next_row_does_not_fit() -> None:
    """Rows 3, 0, 1, 2 of 5, 4, 6, 5 tokens: 5 + 5 = 10, + 4 = 14 is too much; 4 + 6 = 10."""
    assert group_by_tokens([3, 0, 1, 2], [5, 4, 6, 5], 10) == [[3, 0], [1, 2]]
    assert group_by_tokens([3, 0, 1, 2], [5, 4, 6, 5], 9) == [[3], [0, 1], [2]]
    assert group_by_tokens([0, 1, 2], [1, 20, 1], 10) == [[0], [1], [2]], "too long for any"
    assert group_by_tokens([], [], 10) == []


def test_packed_groups_are_few_and_even() -> None:
    """Rows 3, 0, 1, 2 of 7, 4, 5, 6 tokens: 7 + 4 and 6 + 5; in order 7, 4 + 5, 6."""
    lengths = [4, 5, 6, 7]
    assert group_by_tokens([3, 0, 1, 2], lengths, 11) == [[3, 0], [1, 2]]
    assert pack_by_tokens([0, 1, 3, 2], lengths, 11) == [[0, 3], [1, 2]]
    assert len(group_by_tokens([0, 1, 3, 2], lengths, 11)) == 3
    assert pack_by_tokens([0, 1, 2], [1, 20, 1], 10) == [[0, 2], [1]]
    assert pack_by_tokens([], [], 10) == []


def test_packing_keeps_consecutive_groups_where_they_are_fewer() -> None:
    """3 3 | 2 2 2 fits in 6 tokens; longest first, 3 2 2 does not."""
    assert pack_by_tokens(range(5), [3, 3, 2, 2, 2], 6) == [range(2), range(2, 5)]


@given(lengths=lengths_of_rows, data=st.data())
def test_packed_groups_hold_every_row_once_within_the_limit(
    lengths: list[int], data: st.DataObject
) -> None:
    rows = data.draw(st.permutations(range(len(lengths))))
    groups = pack_by_tokens(rows, lengths, LIMIT)
    assert sorted(chain.from_iterable(groups)) == sorted(rows)
    assert all(groups) and max(sum(lengths[row] for row in group) for group in groups) <= LIMIT
    assert len(groups) <= len(group_by_tokens(rows, lengths, LIMIT))
    place = {row: i for i, row in enumerate(rows)}
    assert all(list(group) == sorted(group, key=place.__getitem__) for group in groups)


def test_padding_counts_in_groups_of_padded_rows() -> None:
    """2 x 4000 and 40 x 200 tokens; counted without padding, a group had 18 rows of 4000."""
    lengths = [4000, 3000, *[200] * 20, *[150] * 20]
    assert group_padded(range(42), lengths, 8192) == [range(2), range(2, 42)]
    assert group_padded([0, 1, 2], [1, 20, 1], 10) == [[0], [1], [2]], "too long for any"
    assert group_padded([], [], 10) == []


@given(lengths=lengths_of_rows)
def test_padded_groups_are_within_what_is_planned(lengths: list[int]) -> None:
    rows, longest = range(len(lengths)), max(lengths)
    groups = group_padded(rows, lengths, LIMIT)
    assert list(chain.from_iterable(groups)) == list(rows) and all(groups)
    role = RoleConfig.model_construct(
        max_tokens_per_micro_batch=LIMIT,
        pipeline_model_parallel_size=1,
        num_layers_per_virtual_pipeline_stage=None,
    )
    padded = [len(group) * max(lengths[row] for row in group) for group in groups]
    assert max(padded) <= micro_batch_tokens(role, len(rows), longest)
    assert len(groups) <= micro_batches(role, len(rows), longest)


def test_the_group_with_most_rows_is_halved() -> None:
    assert split_groups([[0], [1, 2, 3], [4, 5]], 4) == [[0], [1], [2, 3], [4, 5]]
    assert split_groups([[0], [1, 2, 3], [4, 5]], 5) == [[0], [1], [2], [3], [4, 5]]


def test_a_shared_prompt_counts_once_in_a_group() -> None:
    """Prompts of 5 and 1 tokens, responses of 2 to each: rows of 7, 7, 7 and 3, 3 tokens."""
    prompts, lengths = [0, 1, 0, 1, 0], [7, 3, 7, 3, 7]
    rows = bring_together([1, 0, 2, 3, 4], prompts)
    assert rows == [1, 3, 0, 2, 4]
    saved = saved_tokens(rows, prompts, [5, 1, 5, 1, 5])
    assert saved == [0, 1, 0, 5, 5]
    assert group_by_tokens(rows, lengths, 9, saved) == [[1, 3], [0, 2], [4]]
    assert group_by_tokens(rows, lengths, 11, saved) == [[1, 3], [0, 2, 4]]
    assert pack_by_tokens(rows, lengths, 16, saved) == [[1, 3, 0, 2, 4]]
    assert pack_by_tokens(rows, lengths, 12, saved) == [[1, 3], [0, 2, 4]]
