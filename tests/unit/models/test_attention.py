"""Packed attention against masked softmax written out for each sequence."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.testing import assert_close

from mindspeed_rlxf.models import attention
from mindspeed_rlxf.models.attention import PackedSequences, SharedPrompts

HEADS, GROUPS, DIM = 4, 2, 8


def written_out(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[tokens, heads, d] of one sequence; query head h reads group h * groups / heads."""
    tokens, heads = query.shape[:2]
    key, value = (x.repeat_interleave(heads // x.size(1), dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / query.size(-1) ** 0.5
    later = torch.ones(tokens, tokens).triu(1).bool()
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), value)


def random_tokens(count: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heads = (HEADS, GROUPS, GROUPS)
    query, key, value = (
        torch.randn(count, h, DIM, generator=generator, dtype=torch.float64) for h in heads
    )
    return query, key, value


def each_alone(lengths: list[int], qkv: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return torch.cat([written_out(*x) for x in zip(*(t.split(lengths) for t in qkv), strict=True)])


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    limit=st.sampled_from([0.0, 2.0, float("inf")]),
)
def test_packed_sequences_attend_as_each_alone(lengths: list[int], limit: float) -> None:
    qkv = random_tokens(sum(lengths))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "MAX_PADDED_AREA", limit)
        got = PackedSequences(lengths=tuple(lengths)).attend(1, *qkv)
    assert_close(got, each_alone(lengths, qkv))


@settings(max_examples=40, deadline=None)
@given(
    groups=st.lists(
        st.tuples(st.integers(1, 9), st.lists(st.integers(1, 9), max_size=9)),
        min_size=1,
        max_size=3,
    ),
    limit=st.sampled_from([0.0, 2.0, float("inf")]),
)
def test_responses_attend_to_one_copy_of_their_prompt(
    groups: list[tuple[int, list[int]]], limit: float
) -> None:
    lengths: list[int] = []
    prompts: list[int | None] = []
    for prompt, responses in groups:
        prompts += [None, *[len(lengths)] * len(responses)]
        lengths += [prompt, *responses]
    qkv = random_tokens(sum(lengths))
    parts = [t.split(lengths) for t in qkv]
    expected = []
    for i, prompt_of in enumerate(prompts):
        whole = [i] if prompt_of is None else [prompt_of, i]
        expected.append(written_out(*(torch.cat([x[j] for j in whole]) for x in parts)))
        expected[-1] = expected[-1][-lengths[i] :]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "MAX_PADDED_AREA", limit)
        pack = SharedPrompts(lengths=tuple(lengths), prompts=tuple(prompts))
        assert_close(pack.attend(1, *qkv), torch.cat(expected))
