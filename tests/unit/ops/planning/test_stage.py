"""Formulas of `docs/models_and_weights.md` against numbers worked out by hand."""

from dataclasses import replace

import pytest

from mindspeed_rlxf.config.schema import ArchitectureConfig, LearningConfig, RoleConfig
from mindspeed_rlxf.ops.planning.stage_memory import (
    LayerBytes,
    buffer_numbers,
    in_flight,
    layer_bytes,
    micro_batch_tokens,
    micro_batches,
    recompute_bytes,
)

# 8 query heads and 4 groups of width 16: 128 query and 64 key columns.
MODEL = ArchitectureConfig(
    num_layers=4,
    hidden_size=128,
    ffn_hidden_size=96,
    num_attention_heads=8,
    num_query_groups=4,
    vocab_size=1000,
    max_position_embeddings=64,
)


NORMED = MODEL.model_copy(update={"qk_layernorm": True})


def role(recompute: str = "none", method: str = "uniform", size: int = 1) -> LearningConfig:
    return LearningConfig(
        model="m",
        architecture=MODEL,
        recompute=recompute,
        recompute_method=method,
        recompute_num_layers=size,
    )


LAYER = LayerBytes(norm=5, attention=30, mlp=60, sent=0, entry=7)

# claim -> (result, number worked out by hand)
CASES = {
    "a plain buffer holds the parameters": (buffer_numbers([100, 64, 1], 3, False), 165),
    # 128 + 64 + 64 = 256; lcm(3, 128) = 384
    "the distributed optimizer rounds parameters to 64 and the whole to equal shards": (
        buffer_numbers([100, 64, 1], 3, True), 384
    ),
    # norms: 2 x (128 x (4 + 2 + 2) + 4) = 2056
    # attention: 2 x (4 x 128 + 3 x 64 + 4 x 16) + 4 x 8 = 1536 + 32 = 1568; mlp: 5 x 2 x 96 = 960
    "bf16 layer": (layer_bytes(MODEL, 10, 1, False, 2).kept, 10 * (2056 + 1568 + 960)),
    # norms: 2 x (128 x 12 + 4) = 3080; attention: 4 x 768 + 32 = 3104; mlp: 1920
    "fp32 layer": (layer_bytes(MODEL, 10, 1, False, 4).kept, 10 * (3080 + 3104 + 1920)),
    # attention: 2 x (4 x 64 + 3 x 32 + 4 x 16) + 4 x 4 = 832 + 16 = 848; mlp: 960 / 2 = 480
    "layer with TP 2": (layer_bytes(MODEL, 10, 2, False, 2).kept, 10 * (2056 + 848 + 480)),
    "sequence parallel divides the norms": (
        layer_bytes(MODEL, 10, 2, True, 2).kept, 5 * 2056 + 10 * (848 + 480)
    ),
    # TP 8: projections 128 + 2 x 64; queries 16 wide (rotated, output twice), keys 16
    # attention: 2 x (256 + 3 x 16 + 16 + 4 x 16) + 4 = 772; mlp: 960 / 8 = 120
    "ranks that share a group keep the projections of all": (
        layer_bytes(MODEL, 10, 8, False, 2).kept, 10 * (2056 + 772 + 120)
    ),
    # attention: 2 x (3 x 128 + 2 x 64 + 4 x 16) + 32 = 1184
    "context parallelism keeps what it exchanges in place of projections": (
        layer_bytes(MODEL, 10, 1, False, 2, cp=2).kept, 10 * (2056 + 1184 + 960)
    ),
    # projected and rotated 256 + 128 + 64, and then 3 x 128 of queries or 128 + 4 x 64 with values
    "beside what is kept while heads are exchanged": (
        layer_bytes(MODEL, 10, 1, False, 2, cp=2).exchange, 10 * 2 * (448 + 384 - 512)
    ),
    # CP 8: 8 x 16 columns of keys; 128 + 3 x 128 with values, another 128, and 2 x 128 repeated
    "repeated keys are there beside their copies": (
        layer_bytes(MODEL, 10, 1, False, 2, cp=8).exchange, 10 * 2 * (448 + 896 - 640)
    ),
    # (4 + 2) x (128 + 64) = 1152
    "normed queries and keys are kept twice": (
        layer_bytes(NORMED, 10, 1, False, 2).kept, 10 * (2056 + 1568 + 960 + 1152)
    ),
    "the MLP's part of a layer": (layer_bytes(MODEL, 10, 2, True, 2).mlp, 10 * 480),
    # (bytes of a micro-batch, bytes at one time) of 4 layers of 100
    "everything is kept": (recompute_bytes(role(), LAYER), (400, 0)),
    # norms keep 7 of 20, the MLP 24 of 60: 2 x 7 + 30 + 24 = 68; a norm has 13 more, the MLP 36
    "norms and gated activations are not kept": (
        recompute_bytes(role("elementwise"), replace(LAYER, norm=20, widened=24)), (4 * 68, 49)
    ),
    "all but MLPs is kept": (recompute_bytes(role("selective"), LAYER), (160, 60)),
    "entries of two groups": (
        recompute_bytes(role("full", "uniform", 2), LAYER), (2 * 7, 200)
    ),
    "two layers again, two kept": (
        recompute_bytes(role("full", "block", 2), LAYER), (2 * 7 + 200, 0)
    ),
    "each layer again": (
        recompute_bytes(role("full", "block", 4), LAYER), (4 * 7, 100)
    ),
    "stage 0 of 4": (in_flight(0, 4, 8), 4),
    "stage 1 of 4": (in_flight(1, 4, 8), 3),
    "stage 3 of 4": (in_flight(3, 4, 8), 1),
    "stage 0 of 4 with two micro-batches": (in_flight(0, 4, 2), 2),
    # two ranks, two chunks: 2 forward passes before chunk 1 starts, 2 more on the first rank, and
    # the one whose backward pass comes next
    "interleaved stage 0 of 2": (in_flight(0, 2, 8, chunks=2), 5),
    "interleaved stage 1 of 2": (in_flight(1, 2, 8, chunks=2), 3),
    "interleaved stage 0 of 2 with two micro-batches": (in_flight(0, 2, 2, chunks=2), 4),
}  # fmt: skip


@pytest.mark.parametrize(("result", "expected"), CASES.values(), ids=CASES)
def test_a_formula_gives_the_number_worked_out_by_hand(result: int, expected: int) -> None:
    assert result == expected


def test_micro_batches_of_a_virtual_pipeline_are_a_multiple_of_its_stages() -> None:
    virtual = {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}
    role = RoleConfig(model="m", architecture=MODEL, micro_batch_size=3, **virtual)
    assert micro_batches(role, 7, 24) == 4  # 3 + 3 + 1, the first or second split
    assert role.model_chunks == 2 and role.micro_batch_multiple == 2


@pytest.mark.parametrize(
    ("limit", "tokens", "count"),
    # seven samples of at most 24 tokens, by 3: 3 + 3 + 1
    [(None, 72, 3), (24, 24, 7), (47, 47, 7), (48, 48, 4), (100, 100, 2), (999, 168, 1)],
)
def test_micro_batches_of_seven_samples(limit: int | None, tokens: int, count: int) -> None:
    role = RoleConfig(
        model="m", architecture=MODEL, micro_batch_size=3, max_tokens_per_micro_batch=limit
    )
    assert micro_batch_tokens(role, 7, 24) == tokens
    assert micro_batches(role, 7, 24) == count
    assert micro_batch_tokens(role, 2, 24) == min(limit or 48, 48)
