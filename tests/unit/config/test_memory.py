"""Each formula of `docs/memory.md` against numbers worked out by hand."""

from __future__ import annotations

import pytest

from mindspeed_rlxf.config.generation_memory import (
    kv_cache_bytes,
    kv_cache_most_tokens,
    kv_cache_rows,
    kv_cache_tokens,
    prefill_tokens,
    round_to_pages,
    row_state_bytes,
    sampling_bytes,
)
from mindspeed_rlxf.config.memory import (
    buffer_numbers,
    checkpoint_bytes,
    chunk_activation_bytes,
    communicators,
    driver_bytes,
    export_bytes,
    gather_buffer_bytes,
    gradient_bytes,
    in_flight,
    last_hidden_bytes,
    layer_activation_bytes,
    log_prob_head_bytes,
    micro_batch_tokens,
    micro_batches,
    mlp_activation_bytes,
    optimizer_bytes,
    optimizer_step_bytes,
    sample_bytes,
    score_head_bytes,
    stage_transfer_bytes,
    store_bytes,
    weight_bytes,
    weight_gradient_bytes,
)
from mindspeed_rlxf.config.schema import (
    ArchitectureConfig,
    LearningConfig,
    OptimizerConfig,
    RoleConfig,
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
        optimizer=OptimizerConfig(),
        architecture=MODEL,
        recompute=recompute,
        recompute_method=method,
        recompute_num_layers=size,
    )


# claim -> (result, number worked out by hand)
CASES = {
    "a plain buffer holds the parameters": (buffer_numbers([100, 64, 1], 3, False), 165),
    # 128 + 64 + 64 = 256; lcm(3, 128) = 384
    "the distributed optimizer rounds parameters to 64 and the whole to equal shards": (
        buffer_numbers([100, 64, 1], 3, True), 384
    ),
    "fp32 training holds 16 bytes": (
        weight_bytes(1000, 4) + gradient_bytes(1000) + optimizer_bytes(1000, 4, 1),
        (4 + 4 + 8) * 1000,
    ),
    "bf16 training holds 18 bytes": (
        weight_bytes(1000, 2) + gradient_bytes(1000) + optimizer_bytes(1000, 2, 1),
        (2 + 4 + 12) * 1000,
    ),
    "shards of an fp32 optimizer": (optimizer_bytes(1000, 4, 4), 250 * 8),
    "shards of a bf16 optimizer": (optimizer_bytes(1000, 2, 4), 250 * 12),
    "shards of the roots": (optimizer_step_bytes(1000, 4), 250 * 4),
    # norms: 2 x (128 x (4 + 2 + 2) + 4) = 2056
    # attention: 2 x (4 x 128 + 3 x 64 + 4 x 16) + 4 x 8 = 1536 + 32 = 1568; mlp: 5 x 2 x 96 = 960
    "bf16 layer": (layer_activation_bytes(MODEL, 10, 1, False, 2), 10 * (2056 + 1568 + 960)),
    # norms: 2 x (128 x 12 + 4) = 3080; attention: 4 x 768 + 32 = 3104; mlp: 1920
    "fp32 layer": (layer_activation_bytes(MODEL, 10, 1, False, 4), 10 * (3080 + 3104 + 1920)),
    # attention: 2 x (4 x 64 + 3 x 32 + 4 x 16) + 4 x 4 = 832 + 16 = 848; mlp: 960 / 2 = 480
    "layer with TP 2": (layer_activation_bytes(MODEL, 10, 2, False, 2), 10 * (2056 + 848 + 480)),
    "sequence parallel divides the norms": (
        layer_activation_bytes(MODEL, 10, 2, True, 2), 5 * 2056 + 10 * (848 + 480)
    ),
    # TP 8: projections 128 + 2 x 64; queries 16 wide (rotated, output twice), keys 16
    # attention: 2 x (256 + 3 x 16 + 16 + 4 x 16) + 4 = 772; mlp: 960 / 8 = 120
    "ranks that share a group keep the projections of all": (
        layer_activation_bytes(MODEL, 10, 8, False, 2), 10 * (2056 + 772 + 120)
    ),
    # (4 + 2) x (128 + 64) = 1152
    "normed queries and keys are kept twice": (
        layer_activation_bytes(NORMED, 10, 1, False, 2), 10 * (2056 + 1568 + 960 + 1152)
    ),
    "the MLP's part of a layer": (mlp_activation_bytes(MODEL, 10, 2, True, 2), 10 * 480),
    # (bytes of a micro-batch, bytes at one time) of 4 layers of 100, 60 of them the MLP's, entry 7
    "everything is kept": (chunk_activation_bytes(role(), 100, 60, 7), (400, 0)),
    "all but MLPs is kept": (chunk_activation_bytes(role("selective"), 100, 60, 7), (160, 60)),
    "entries of two groups": (
        chunk_activation_bytes(role("full", "uniform", 2), 100, 60, 7), (2 * 7, 200)
    ),
    "two layers again, two kept": (
        chunk_activation_bytes(role("full", "block", 2), 100, 60, 7), (2 * 7 + 200, 0)
    ),
    "each layer again": (
        chunk_activation_bytes(role("full", "block", 4), 100, 60, 7), (4 * 7, 100)
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
    "head of less than a chunk": (log_prob_head_bytes(300, 500, 1024), 16 * 300 * 500),
    "head of one chunk": (log_prob_head_bytes(3000, 500, 1024), 16 * 1024 * 500),
    # bf16: 20 tokens x 128 x (4 + 2 + 2), and 5 that are read x 128 x 2
    "last hidden states": (last_hidden_bytes(20, 5, 128, 2), 20480 + 1280),
    "score head": (score_head_bytes(5, 128), 5 * 128 * 4),
    "stage transfer": (stage_transfer_bytes(20, 128, 2), 2 * 20 * 128 * 2),
    "gather buffer": (gather_buffer_bytes(20, 128, 2), 20 * 128 * 2),
    "the largest gradient counts once": (weight_gradient_bytes([10, 500, 20], [], 0, 2), 1000),
    "those of experts come together": (weight_gradient_bytes([10, 500], [90, 200], 4, 2), 1600),
    # 2 x 72 tokens x 4 layers x (4 / 2) groups x 16 x 2 bytes
    "cache with TP 2": (kv_cache_bytes(72, MODEL, 2, 2), 36864),
    "two ranks share a group, and each caches it": (kv_cache_bytes(72, MODEL, 8, 2), 36864 // 2),
    "0.3 of 1000 bytes hold 30 tokens of 10": (kv_cache_tokens(10, 1000), 30),
    "no limit where the memory is not known": (kv_cache_tokens(10, None), None),
    "pages of 64 tokens": ([round_to_pages(n) for n in (1, 64, 65)], [64, 64, 128]),
    "rows up to the limit": (kv_cache_rows(5, 40, 100, 60, 10), 5),
    "rows that there are": (kv_cache_rows(50, 40, 100, 60, None), 40),
    "all rows where the memory is not known": (kv_cache_rows(None, 40, 100, 60, None), 40),
    # 100 + 30 tokens are 3 pages, which is more than the whole row of 160
    "a row counts with half a response": (kv_cache_rows(None, 40, 100, 60, 500), 3),
    # 100 + 1500 tokens are 25 pages
    "in whole pages": (kv_cache_rows(None, 40, 100, 3000, 4800), 3),
    "one row in any case": (kv_cache_rows(None, 40, 100, 60, 10), 1),
    "a cache of given rows": (kv_cache_most_tokens(3, 160, None), 480),
    "a cache that ends where the memory is to": (kv_cache_most_tokens(40, 160, 500), 500),
    "a cache of few rows": (kv_cache_most_tokens(2, 160, 500), 320),
    "a cache of one row in any case": (kv_cache_most_tokens(1, 160, 100), 160),
    "tokens, log-probs and random numbers": (row_state_bytes(3, 9), 3 * 10 * (8 + 4 + 4)),
    "prefill of all prompts": (prefill_tokens(3, 512), 1536),
    "prefill is bounded": (prefill_tokens(300, 512), 16384),
    "prefill takes one prompt": (prefill_tokens(3, 20000), 20000),
    "sampling": (sampling_bytes(10, 1000, True), 10 * 1000 * 28),
    # four arrays of logits, probabilities, their sum twice: 28; ids: 8
    "top-p sorts the vocabulary": (sampling_bytes(10, 1000, True, True), 10 * 1000 * 36),
    "greedy decoding does not sort": (sampling_bytes(10, 1000, False), 10 * 1000 * (4 + 4 + 4)),
    "groups of one rank hold no buffers": (communicators(1, 1, 1, True, True), 0),
    "one group": (communicators(2, 1, 1, False, False), 1),
    # tp, pp, dp, tp x pp for the gradient norm, tp of the rollout
    "all groups": (communicators(2, 2, 2, True, True), 5),
    # and tp, ep, tp x ep, ep for gradients, tp and ep of the rollout
    "all groups of experts": (communicators(2, 2, 2, True, True, 2, True), 5 + 6),
    # 8 x 10; 20 x (8 + 3 x 4 + 4 + 4 + 1 + 4 + 4 + 4 + 1) = 20 x 42; 13 for the slot more; 29
    "rows of a sample": (sample_bytes(10, 20), 80 + 1000 + 13 + 29),
    "rows of two iterations": (store_bytes(6, 962), 2 * 6 * 962),
    "driver": (driver_bytes(1000, 6, 10), 1000 + 480),
    "final weights": (export_bytes(1000, 2, 4), 6000),
    "bf16 checkpoint": (checkpoint_bytes(1000, 2), 14000),
    "fp32 checkpoint": (checkpoint_bytes(1000, 4), 12000),
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
