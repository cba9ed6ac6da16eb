"""How many requests a vLLM server computes at once, worked out by hand."""

from typing import Any

from mindspeed_rlxf.rollout.server_sizes import server_rows

# fp32: embedding 16 x 8, which is also the output layer; query, key and value 24 x 8, projection
# 8 x 8, MLP 3 x 16 x 8, norms 3 x 8
WEIGHTS = 4 * (128 + 192 + 64 + 384 + 24)
# 512 + 8 / 2 tokens are 9 pages of 64, more than the 520 tokens that a row can have. Each token has
# a key and a value of 2 groups of width 4.
ROW = 520 * 2 * 2 * 4 * 4


def test_a_server_computes_as_many_requests_as_its_cache_holds(make_config: Any) -> None:
    config = make_config()
    half = WEIGHTS + 128 * ROW  # of the device, by gpu_memory_utilization
    assert server_rows(config, False, 2 * half) == 128
    assert server_rows(config, False, 2 * half + 254 * ROW) == 128  # 255 rows
    assert server_rows(config, False, 2 * half - 2) == 64  # 127 rows
    assert [server_rows(config, False, size) for size in (0, 10**12)] == [64, 512]
    assert server_rows(config, True, 2 * half) == 256, "on CPU"
    actor = config.actor_rollout.model_copy(update={"num_samples_per_step": 7})
    assert server_rows(config.model_copy(update={"actor_rollout": actor}), False, 2 * half) == 7
