"""In every layout each number of the rollout's weights comes from exactly one right place."""

from __future__ import annotations

from collections import Counter, defaultdict
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mindspeed_rlxf.config.layout import ParallelLayout
from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.models.parameters import (
    Head,
    StageParameter,
    hf_shapes,
    rank_parameters,
    shard_slices,
    stage_parameters,
)
from mindspeed_rlxf.rollout.transfer_plan import (
    Move,
    TrainingLayout,
    make_buckets,
    order_peers,
    plan_layout_moves,
)

PLAIN = ArchitectureConfig(
    num_layers=4, hidden_size=6, ffn_hidden_size=8, num_attention_heads=8, num_query_groups=4,
    kv_channels=2, vocab_size=13, max_position_embeddings=8,
    untie_embeddings_and_output_weights=True,
)  # fmt: skip
FAMILIES = {
    "plain": PLAIN,
    "tied": PLAIN.model_copy(update={"untie_embeddings_and_output_weights": False}),
    "shared groups": PLAIN.model_copy(update={"num_query_groups": 2}),  # by two ranks of four
    "biased": PLAIN.model_copy(update={"add_qkv_bias": True}),
    "experts": PLAIN.model_copy(update={"num_experts": 4, "qk_layernorm": True}),
}
LM = Head.LANGUAGE_MODEL


@st.composite
def layouts(draw: Any) -> tuple[str, TrainingLayout, ParallelLayout, int]:
    tp, pp, dp = (draw(st.sampled_from([1, 2, 4])) for _ in range(3))
    chunks = draw(st.sampled_from([1, 2])) if pp == 2 else 1
    name = draw(st.sampled_from(sorted(FAMILIES)))
    ep = draw(st.sampled_from([n for n in (1, 2, 4) if dp % n == 0])) if name == "experts" else 1
    rollout_tp, rollout_dp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 3]))
    training = TrainingLayout(ParallelLayout(tp * pp * dp, tp, pp), chunks, ep)
    shares = name == "experts" and rollout_dp == 2
    return name, training, ParallelLayout(rollout_tp * rollout_dp, rollout_tp), 1 + shares


def whole_model(a: ArchitectureConfig) -> dict[str, Tensor]:
    """Every number of the model is another."""
    first, found = 1, {}
    for name, shape in hf_shapes(a, LM).items():
        found[name] = torch.arange(first, first + prod(shape)).view(shape)
        first += prod(shape)
    return found


def shard(p: StageParameter, a: ArchitectureConfig, whole: Any, tp_rank: int, tp: int) -> Tensor:
    """As loading from a folder makes it."""
    slices = shard_slices(p, a, tp_rank, tp)
    parts = [whole[s.source].narrow(s.dim, s.start, s.size) for s in slices]
    return torch.cat(parts, dim=slices[0].dim)


def held_in_training(
    a: ArchitectureConfig, training: TrainingLayout, whole: dict[str, Tensor]
) -> list[dict[str, Tensor]]:
    """By rank; of a tied model the output layer's copy on the last stage is wrong on purpose."""
    ranks, found = training.ranks, []
    for rank in range(ranks.world_size):
        ep_rank = ranks.dp_rank(rank) % training.ep
        place = ranks.pp_rank(rank), ranks.pp, training.chunks, ep_rank, training.ep
        found.append(
            {
                p.name: shard(p, a, whole, ranks.tp_rank(rank), ranks.tp)
                for p in rank_parameters(a, LM, *place)
            }
        )
    return found


@settings(max_examples=25, deadline=None)
@given(layouts(), st.sampled_from([5, 50, 10**6]))
@example(("experts", TrainingLayout(ParallelLayout(4), 1, 2), ParallelLayout(4, 1), 4), 50)
def test_every_number_arrives_once_and_where_it_belongs(
    case: tuple[str, TrainingLayout, ParallelLayout, int], limit: int
) -> None:
    name, training, rollout, ep = case
    a = FAMILIES[name]
    whole = whole_model(a)
    held = held_in_training(a, training, whole)
    planned = list(plan_layout_moves(a, training, rollout, ep))
    for receiver in range(rollout.world_size):
        tp_rank, ep_rank = rollout.tp_rank(receiver), rollout.dp_rank(receiver) % ep
        table = list(stage_parameters(a, LM, ep_rank=ep_rank, ep=ep))
        wanted = {p.name: shard(p, a, whole, tp_rank, rollout.tp) for p in table}
        got = {n: torch.zeros_like(t) for n, t in wanted.items()}
        arrivals = {n: torch.zeros_like(t) for n, t in wanted.items()}
        mine = [move for move in planned if move.receiver == receiver]
        for move in (piece for bucket in make_buckets(mine, limit) for piece in bucket):
            piece = held[move.sender][move.source].narrow(move.dim, move.source_start, move.size)
            target = got[move.target].narrow(move.dim, move.target_start, move.size)
            assert piece.numel() == move.numbers
            target.copy_(piece)
            arrivals[move.target].narrow(move.dim, move.target_start, move.size).add_(1)
        for n, expected in wanted.items():
            assert torch.equal(got[n], expected), n
            assert bool((arrivals[n] == 1).all()), n


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_equal_layouts_move_whole_tensors(name: str, tp: int) -> None:
    a = FAMILIES[name]
    planned = list(
        plan_layout_moves(a, TrainingLayout(ParallelLayout(tp, tp)), ParallelLayout(tp, tp))
    )
    assert len(planned) == tp * len(list(stage_parameters(a, LM)))
    assert all(m.source_start == m.target_start == 0 for m in planned)
    split = [m for m in planned if "norm" not in m.target and "router" not in m.target]
    assert all(m.sender == m.receiver for m in split)  # what is whole everywhere is shared out


def test_replicas_share_the_sending() -> None:
    """Four replicas, one receiver of everything: nobody sends much more than a quarter."""
    sent: Counter[int] = Counter()
    for move in plan_layout_moves(PLAIN, TrainingLayout(ParallelLayout(4)), ParallelLayout(1)):
        sent[move.sender] += move.numbers
    whole = plan_layout_moves(PLAIN, TrainingLayout(ParallelLayout(1)), ParallelLayout(1))
    largest = max(move.numbers for move in whole)
    assert set(sent) == {0, 1, 2, 3}
    assert max(sent.values()) - min(sent.values()) <= largest


def test_a_tensor_parallel_rank_twice_as_wide_takes_from_two() -> None:
    """TP 2 -> 1: of QKV two times two groups, of the gated MLP gate and up of each."""
    found = defaultdict(list)
    for move in plan_layout_moves(PLAIN, TrainingLayout(ParallelLayout(2, 2)), ParallelLayout(1)):
        found[move.target].append((move.sender, move.source_start, move.target_start, move.size))
    # a group is 2 query heads, a key head and a value head of 2: 8 rows
    qkv = found["decoder.layers.0.self_attention.linear_qkv.weight"]
    assert qkv == [(0, 0, 0, 16), (1, 0, 16, 16)]
    assert found["decoder.layers.0.mlp.linear_fc1.weight"] == [
        (0, 0, 0, 4), (0, 4, 8, 4), (1, 0, 4, 4), (1, 4, 12, 4),
    ]  # fmt: skip
    # 13 words: 7 and, without the padding, 6
    assert found["embedding.word_embeddings.weight"] == [(0, 0, 0, 7), (1, 0, 7, 6)]


def test_ranks_that_share_a_query_group_send_and_receive_their_rows_of_it() -> None:
    """Of one group: four query heads, a key head and a value head of 2, 12 rows."""
    a = PLAIN.model_copy(update={"num_attention_heads": 4, "num_query_groups": 1})
    qkv = "decoder.layers.0.self_attention.linear_qkv.weight"

    def sent(tp: int, rollout_tp: int) -> list[tuple[int, int, int, int, int]]:
        training = TrainingLayout(ParallelLayout(tp, tp))
        return [
            (m.sender, m.receiver, m.source_start, m.target_start, m.size)
            for m in plan_layout_moves(a, training, ParallelLayout(rollout_tp, rollout_tp))
            if m.target == qkv
        ]

    # ranks of four hold three rows each: q0-2, q3-5, q6-7 k0, k1 v0-1
    assert sent(4, 2) == [(0, 0, 0, 0, 3), (1, 0, 0, 3, 3), (2, 1, 0, 0, 3), (3, 1, 0, 3, 3)]
    assert sent(1, 4) == [(0, rank, 3 * rank, 0, 3) for rank in range(4)]


def test_buckets_hold_no_more_than_the_limit_but_one_row() -> None:
    move = Move(0, 0, "a", "a", 0, 0, 0, size=10, width=4)
    found = make_buckets([move, move], limit=12)
    assert [[m.size for m in b] for b in found] == [[3], [3], [3], [1], [3], [3], [3], [1]]
    assert [[m.size for m in bucket] for bucket in make_buckets([move, move], 56)] == [[10], [10]]
    assert [[m.size for m in bucket] for bucket in make_buckets([move, move], 80)] == [[10, 10]]
    assert len(make_buckets([move], 3)) == 10


@pytest.mark.parametrize(("senders", "receivers"), [(1, 1), (2, 3), (4, 2), (3, 5), (1, 4)])
def test_the_order_of_exchanges_cannot_deadlock(senders: int, receivers: int) -> None:
    """Each side takes its next peer only when that one takes it: the exchange comes to an end."""
    orders = {
        **{("s", s): order_peers(s, senders, receivers, True) for s in range(senders)},
        **{("r", r): order_peers(r, senders, receivers, False) for r in range(receivers)},
    }
    assert all(sorted(orders["s", s]) == list(range(receivers)) for s in range(senders))
    met = 0
    while any(orders.values()):
        pairs = [
            (s, orders["s", s][0])
            for s in range(senders)
            if orders["s", s] and orders["r", orders["s", s][0]][0] == s
        ]
        assert pairs, f"all wait: {orders}"
        for s, r in pairs:
            orders["s", s].pop(0)
            orders["r", r].pop(0)
            met += 1
    assert met == senders * receivers
