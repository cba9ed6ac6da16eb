"""How much a vLLM server caches, and how many requests it computes at once; also for the plan."""

from mindspeed_rlxf.config.generation_memory import kv_cache_bytes, kv_cache_rows
from mindspeed_rlxf.config.host_rules import GIB
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.models.parameter_counts import adapter_sizes, model_elements
from mindspeed_rlxf.models.parameters import Head

CPU_ROWS = 256  # requests at once on CPU, where the configuration sets none
LEAST_ROWS, MOST_ROWS = 64, 512  # the same on a device, whatever its memory; powers of two


def server_weight_bytes(config: RunConfig) -> int:
    """Return the bytes of weights and adapters on one of a server's ranks."""
    actor, tp, head = config.actor_rollout, config.rollout_tp, Head.LANGUAGE_MODEL
    weights = model_elements(actor.architecture, head) * _itemsize(config) // tp
    adapters = sum(adapter_sizes(actor.architecture, head, actor.lora, tp))
    return weights + adapters * _itemsize(config)


def server_cache_bytes(config: RunConfig, on_cpu: bool, device_bytes: int) -> int:
    """Return the bytes of the KV cache on one of a server's ranks."""
    keys = config.rollout.vllm
    if keys.kv_cache_gib or on_cpu:
        return int((keys.kv_cache_gib or 1.0) * GIB)
    share = int(keys.gpu_memory_utilization * device_bytes)
    return max(0, share - server_weight_bytes(config))


def server_rows(config: RunConfig, on_cpu: bool, device_bytes: int | None) -> int:
    """Return how many requests a server computes at once.

    What the configuration sets, else as many as the KV cache holds with the longest prompt and half
    a response each, rounded down to a power of two.

    Args:
        config: The run.
        on_cpu: Whether it computes on CPU.
        device_bytes: Memory of its smallest device; None = unknown, so that all fit.
    """
    actor = config.actor_rollout
    configured = config.rollout.vllm.max_num_seqs or actor.num_samples_per_step
    if configured is not None:
        return configured
    if on_cpu:
        return CPU_ROWS
    if device_bytes is None:
        return MOST_ROWS
    token_bytes = kv_cache_bytes(1, actor.architecture, config.rollout_tp, _itemsize(config))
    tokens = server_cache_bytes(config, False, device_bytes) // token_bytes
    sizes = actor.max_prompt_length, actor.max_new_tokens
    rows = kv_cache_rows(None, MOST_ROWS, *sizes, tokens)
    return max(LEAST_ROWS, 1 << (rows.bit_length() - 1))


def _itemsize(config: RunConfig) -> int:
    return 2 if config.actor_rollout.bf16 else 4
