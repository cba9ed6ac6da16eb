"""transformers' classes of each family: configuration, language model, scorer."""

from __future__ import annotations

from typing import Any

from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

from mindspeed_rlxf.config.schema import ArchitectureConfig

Family = tuple[Any, Any, Any]

LLAMA: Family = (LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification)
QWEN2: Family = (Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification)
QWEN3: Family = (Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification)


def family_of(architecture: ArchitectureConfig) -> Family:
    if architecture.add_qkv_bias:
        return QWEN2
    return QWEN3 if architecture.qk_layernorm else LLAMA
