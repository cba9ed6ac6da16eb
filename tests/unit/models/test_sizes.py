"""Parameter counts against the arithmetic of a small model."""

import pytest

from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.models.parameter_counts import (
    model_elements,
    received_elements,
    shard_sizes,
    split_sizes,
)
from mindspeed_rlxf.models.parameters import Head

LM, SCORE = Head.LANGUAGE_MODEL, Head.SCORE
MODEL = ArchitectureConfig(
    num_layers=2, hidden_size=8, ffn_hidden_size=12, num_attention_heads=4, num_query_groups=2,
    vocab_size=7, max_position_embeddings=64, untie_embeddings_and_output_weights=True,
)  # fmt: skip
TIED = MODEL.model_copy(update={"untie_embeddings_and_output_weights": False})

# heads of width 2. norms 8 + 8; q, k, v 8 x (8 + 4 + 4); o 8 x 8; gate, up, down 3 x 8 x 12
LAYER = 16 + 128 + 64 + 288
EMBEDDING = 7 * 8
PADDED = 8 * 8  # over two ranks


def test_whole_models() -> None:
    assert model_elements(MODEL, LM) == 2 * EMBEDDING + 2 * LAYER + 8
    assert model_elements(TIED, LM) == EMBEDDING + 2 * LAYER + 8
    assert model_elements(MODEL, SCORE) == EMBEDDING + 2 * LAYER + 8 + 8
    assert model_elements(SPARSE, LM) == 2 * EMBEDDING + 2 * (SPARSE_LAYER + 4 * EXPERT) + 8


def test_shards_of_tensor_parallel_ranks_hold_padding_and_whole_norms() -> None:
    layer = 16 + (128 + 64 + 288) // 2
    assert sum(shard_sizes(MODEL, LM, 2, 0, 1)) == PADDED + 2 * layer + 8


FOUR = TIED.model_copy(update={"num_layers": 4})


@pytest.mark.parametrize(
    ("model", "stages", "sizes"),  # stages: number, chunks on each rank
    [
        (MODEL, (2,), [EMBEDDING + LAYER, LAYER + 8 + EMBEDDING]),
        (TIED, (2,), [EMBEDDING + LAYER, LAYER + 8 + EMBEDDING]),  # has the embedding twice
        (FOUR, (2, 2), [EMBEDDING + 2 * LAYER, 2 * LAYER + 8 + EMBEDDING]),
    ],
)
def test_a_stage_receives_the_numbers_of_all_other_stages(
    model: ArchitectureConfig, stages: tuple[int, ...], sizes: list[int]
) -> None:
    assert [sum(shard_sizes(model, LM, 1, rank, *stages)) for rank in (0, 1)] == sizes
    own_head = sizes[1] if model is MODEL else sizes[1] - EMBEDDING  # else the first stage's
    assert received_elements(model, LM, 1, 0, *stages) == own_head
    assert received_elements(model, LM, 1, 1, *stages) == sizes[0]
    assert received_elements(model, LM, 1, 0, 1) == 0


SPARSE = MODEL.model_copy(update={"num_experts": 4, "moe_ffn_hidden_size": 6, "qk_layernorm": True})
# gate, up and down of one expert 3 x 8 x 6; norms of a head's width 2
EXPERT = 144
SPARSE_LAYER = 16 + 128 + 64 + 2 * 2 + 4 * 8  # and a router of 4 x 8


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_an_expert_rank_holds_its_share_of_the_experts_and_all_else(ep: int) -> None:
    shared, experts = split_sizes(SPARSE, SCORE, 1, 0, 1, 1, ep)
    assert sum(shared) == EMBEDDING + 2 * SPARSE_LAYER + 8 + 8
    assert sum(experts) == 2 * 4 // ep * EXPERT
    assert sum(shard_sizes(SPARSE, SCORE, 1, 0, 1, 1, ep)) == sum(shared) + sum(experts)
    _, halves = split_sizes(SPARSE, SCORE, 2, 0, 1, 1, ep)
    assert sum(halves) == 2 * 4 // ep * EXPERT // 2


def test_the_rollout_receives_its_share_of_the_experts_of_other_stages() -> None:
    assert received_elements(SPARSE, LM, 1, 0, 1, 1, 4) == 0
    layer = SPARSE_LAYER + 2 * EXPERT
    assert received_elements(SPARSE, LM, 1, 0, 2, 1, 2) == layer + 8 + EMBEDDING
