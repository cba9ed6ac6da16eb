"""Each formula of `docs/memory.md` against numbers worked out by hand."""

from __future__ import annotations

import pytest

from mindspeed_rlxf.config import memory
from mindspeed_rlxf.config.schema import ArchitectureConfig, RoleConfig

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


def test_distributed_optimizer_fills_parameters_to_64_and_the_whole_to_equal_shards() -> None:
    sizes = [100, 64, 1]
    assert memory.buffer_numbers(sizes, dp=3, distributed=False) == 165
    # 128 + 64 + 64 = 256; lcm(3, 128) = 384
    assert memory.buffer_numbers(sizes, dp=3, distributed=True) == 384


def test_training_state_takes_16_bytes_in_fp32_and_18_in_bf16() -> None:
    for itemsize, total in ((4, 4 + 4 + 8), (2, 2 + 4 + 12)):
        held = memory.weight_bytes(1000, itemsize) + memory.gradient_bytes(1000)
        assert held + memory.optimizer_bytes(1000, itemsize, shards=1) == total * 1000


def test_optimizer_is_shared_by_its_shards() -> None:
    assert memory.optimizer_bytes(1000, 4, shards=4) == 250 * 8
    assert memory.optimizer_bytes(1000, 2, shards=4) == 250 * 12
    assert memory.optimizer_step_bytes(1000, shards=4) == 250 * 4


def test_activations_of_a_layer() -> None:
    # bf16. norms: 2 x (128 x (4 + 2 + 2) + 4) = 2056
    # attention: 2 x (4 x 128 + 3 x 64 + 4 x 16) + 4 x 8 = 1536 + 32 = 1568; mlp: 5 x 2 x 96 = 960
    assert memory.layer_activation_bytes(MODEL, 10, 1, False, 2) == 10 * (2056 + 1568 + 960)
    # fp32. norms: 2 x (128 x 12 + 4) = 3080; attention: 4 x 768 + 32 = 3104; mlp: 1920
    assert memory.layer_activation_bytes(MODEL, 10, 1, False, 4) == 10 * (3080 + 3104 + 1920)


def test_activations_divide_by_tensor_parallel_and_norms_by_sequence_parallel_too() -> None:
    # attention: 2 x (4 x 64 + 3 x 32 + 4 x 16) + 4 x 4 = 832 + 16 = 848; mlp: 960 / 2 = 480
    assert memory.layer_activation_bytes(MODEL, 10, 2, False, 2) == 10 * (2056 + 848 + 480)
    assert memory.layer_activation_bytes(MODEL, 10, 2, True, 2) == 5 * 2056 + 10 * (848 + 480)


def test_ranks_that_share_a_group_keep_the_projections_of_all() -> None:
    # bf16, TP 8: projections 128 + 2 x 64; queries 16 wide (rotated, output twice), keys 16
    # attention: 2 x (256 + 3 x 16 + 16 + 4 x 16) + 4 = 772; mlp: 960 / 8 = 120
    assert memory.layer_activation_bytes(MODEL, 10, 8, False, 2) == 10 * (2056 + 772 + 120)


def test_normed_queries_and_keys_are_kept_in_fp32_and_again() -> None:
    normed = MODEL.model_copy(update={"qk_layernorm": True})
    plain = memory.layer_activation_bytes(MODEL, 10, 1, False, 2)
    # (4 + 2) x (128 + 64) = 1152
    assert memory.layer_activation_bytes(normed, 10, 1, False, 2) == plain + 10 * 1152


@pytest.mark.parametrize(
    ("pp_rank", "micro_batches", "held"), [(0, 8, 4), (1, 8, 3), (3, 8, 1), (0, 2, 2)]
)
def test_first_stage_of_four_holds_most_micro_batches(
    pp_rank: int, micro_batches: int, held: int
) -> None:
    assert memory.in_flight(pp_rank, 4, micro_batches) == held


@pytest.mark.parametrize(
    ("pp_rank", "micro_batches", "held"),
    # two ranks, two chunks: 2 forward passes before chunk 1 starts, 2 more on the first rank, and
    # the one whose backward pass comes next
    [(0, 8, 5), (1, 8, 3), (0, 2, 4)],
)
def test_interleaved_stages_hold_chunks(pp_rank: int, micro_batches: int, held: int) -> None:
    assert memory.in_flight(pp_rank, 2, micro_batches, chunks=2) == held


def test_micro_batches_of_a_virtual_pipeline_are_a_multiple_of_its_stages() -> None:
    virtual = {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}
    role = RoleConfig(model="m", architecture=MODEL, micro_batch_size=3, **virtual)
    assert memory.micro_batches(role, 7, 24) == 4  # 3 + 3 + 1, the first or second split
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
    assert memory.micro_batch_tokens(role, 7, 24) == tokens
    assert memory.micro_batches(role, 7, 24) == count
    assert memory.micro_batch_tokens(role, 2, 24) == min(limit or 48, 48)


def test_head_of_a_language_model_holds_one_chunk() -> None:
    assert memory.log_prob_head_bytes(tokens=300, vocab=500, chunk=1024) == 16 * 300 * 500
    assert memory.log_prob_head_bytes(tokens=3000, vocab=500, chunk=1024) == 16 * 1024 * 500


def test_hidden_states_at_the_end() -> None:
    # bf16: 20 tokens x 128 x (4 + 2 + 2), and 5 that are read x 128 x 2
    assert memory.last_hidden_bytes(20, 5, 128, 2) == 20480 + 1280
    assert memory.score_head_bytes(5, 128) == 5 * 128 * 4
    assert memory.stage_transfer_bytes(20, 128, 2) == 2 * 20 * 128 * 2
    assert memory.gather_buffer_bytes(20, 128, 2) == 20 * 128 * 2


def test_largest_gradient_counts_once() -> None:
    assert memory.weight_gradient_bytes([10, 500, 20], 2) == 1000


def test_cache_holds_keys_and_values_of_every_layer_and_group() -> None:
    # 2 x 3 rows x 24 tokens x 4 layers x (4 / 2) groups x 16 x 2 bytes
    assert memory.kv_cache_bytes(3, 24, MODEL, tp=2, itemsize=2) == 36864
    # two ranks share a group, and each has it
    assert memory.kv_cache_bytes(3, 24, MODEL, tp=8, itemsize=2) == 36864 // 2


@pytest.mark.parametrize(
    ("limit", "memory_bytes", "rows"),
    [
        (5, None, 5),
        (50, 10, 40),  # no more than there are
        (None, None, 40),
        (None, 1000, 3),  # 300 bytes hold 3 rows of 100
        (None, 100, 1),  # one in any case
    ],
)
def test_rows_of_the_cache(limit: int | None, memory_bytes: int | None, rows: int) -> None:
    assert memory.kv_cache_rows(limit, 40, 100, memory_bytes) == rows


def test_a_prefill_pass_is_bounded_but_takes_one_prompt() -> None:
    assert memory.prefill_tokens(rows=3, prompt=512) == 1536
    assert memory.prefill_tokens(rows=300, prompt=512) == 16384
    assert memory.prefill_tokens(rows=3, prompt=20000) == 20000


def test_sampling_sorts_the_vocabulary() -> None:
    assert memory.sampling_bytes(10, 1000, do_sample=True) == 10 * 1000 * (4 + 4 + 4 + 8 + 4 + 4)
    assert memory.sampling_bytes(10, 1000, do_sample=False) == 10 * 1000 * (4 + 4 + 4)


def test_groups_of_one_rank_hold_no_buffers() -> None:
    assert memory.communicators(1, 1, 1, trains=True, generates=True) == 0
    assert memory.communicators(2, 1, 1, trains=False, generates=False) == 1
    # tp, pp, dp, tp x pp for the gradient norm, tp of the rollout
    assert memory.communicators(2, 2, 2, trains=True, generates=True) == 5


def test_host_memory_of_rows() -> None:
    # 8 x 10; 20 x (8 + 3 x 4 + 4 + 4 + 1 + 4 + 4 + 4 + 1) = 20 x 42; 13 for the slot more; 29
    assert memory.sample_bytes(prompt=10, response=20) == 80 + 1000 + 13 + 29
    assert memory.store_bytes(samples=6, sample_bytes=962) == 2 * 6 * 962
    assert memory.driver_bytes(process=1000, samples=6, prompt=10) == 1000 + 480


def test_disk() -> None:
    assert memory.export_bytes(1000, itemsize=2, stored_itemsize=4) == 6000
    assert memory.checkpoint_bytes(1000, itemsize=2) == 14000
    assert memory.checkpoint_bytes(1000, itemsize=4) == 12000
