"""The shipped architectures, from 0.5 B to 70 B: transformers' names and shapes, tiled by ranks."""

from typing import Any

import pytest
import yaml

from mindspeed_rlxf.config.compose import builtin_config_dir
from mindspeed_rlxf.config.hf_config import find_disagreements
from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.models.parameters import Head, hf_shapes
from tests.families import LLAMA, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, on_meta, stored_shapes

LLAMA3_ROPE = {
    "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


KEYS = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "vocab_size", "max_position_embeddings", "rope_theta", "rms_norm_eps",
)  # fmt: skip


def published(*numbers: float, tied: bool = False, **rest: Any) -> dict[str, Any]:
    """The numbers of a published config.json, in the order of KEYS."""
    return {**dict(zip(KEYS, numbers, strict=True)), "tie_word_embeddings": tied, **rest}


# Billions of parameters as published, family, numbers of config.json (model cards on the hub).
MODELS: dict[str, tuple[float, Any, dict[str, Any]]] = {
    "llama2-7b": (6.74, LLAMA, published(32, 4096, 11008, 32, 32, 32000, 4096, 1e4, 1e-5)),
    "llama3-8b": (8.03, LLAMA, published(32, 4096, 14336, 32, 8, 128256, 8192, 5e5, 1e-5)),
    "llama31-8b": (
        8.03, LLAMA,
        published(32, 4096, 14336, 32, 8, 128256, 131072, 5e5, 1e-5,
                  rope_scaling={**LLAMA3_ROPE, "factor": 8.0}),
    ),
    "llama32-1b": (
        1.24, LLAMA,
        published(16, 2048, 8192, 32, 8, 128256, 131072, 5e5, 1e-5, tied=True, head_dim=64,
                  rope_scaling={**LLAMA3_ROPE, "factor": 32.0}),
    ),
    "llama3-70b": (70.6, LLAMA, published(80, 8192, 28672, 64, 8, 128256, 8192, 5e5, 1e-5)),
    "qwen25-7b": (7.62, QWEN2, published(28, 3584, 18944, 28, 4, 152064, 32768, 1e6, 1e-6)),
    "qwen25-32b": (32.8, QWEN2, published(64, 5120, 27648, 40, 8, 152064, 32768, 1e6, 1e-6)),
    "qwen3-8b": (
        8.19, QWEN3, published(36, 4096, 12288, 32, 8, 151936, 40960, 1e6, 1e-6, head_dim=128)
    ),
    "qwen3-30b-a3b": (
        30.5, QWEN3_MOE,
        published(48, 2048, 6144, 32, 4, 151936, 40960, 1e6, 1e-6, head_dim=128, num_experts=128,
                  num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
                  decoder_sparse_step=1, mlp_only_layers=[], use_sliding_window=False),
    ),
    "mixtral-8x7b": (
        46.7, MIXTRAL,
        published(32, 4096, 14336, 32, 8, 32000, 32768, 1e6, 1e-5, num_local_experts=8,
                  num_experts_per_tok=2, sliding_window=None),
    ),
}  # fmt: skip
SHIPPED = sorted(p.stem for p in (builtin_config_dir() / "model").glob("*.yaml"))


def architecture(name: str) -> ArchitectureConfig:
    text = (builtin_config_dir() / "model" / f"{name}.yaml").read_text(encoding="utf-8")
    keys = yaml.safe_load(text)[name]
    return ArchitectureConfig(
        **{k: float(v) if k == "norm_epsilon" else v for k, v in keys.items()}
    )


def test_every_shipped_model_is_checked_here() -> None:
    assert set(SHIPPED) - {"tiny"} == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_the_yaml_says_what_config_json_says(name: str) -> None:
    _, (config_class, _, _), numbers = MODELS[name]
    json = {**numbers, "model_type": config_class.model_type}
    assert find_disagreements(architecture(name), json, scored=False) == []


@pytest.mark.parametrize("head", list(Head))
@pytest.mark.parametrize("name", MODELS)
def test_names_and_shapes_are_those_of_transformers(name: str, head: Head) -> None:
    billions, (config_class, language_model, scorer), numbers = MODELS[name]
    config = config_class(**numbers, num_labels=1, pad_token_id=0)
    model = on_meta(language_model if head is Head.LANGUAGE_MODEL else scorer, config)
    assert hf_shapes(architecture(name), head) == stored_shapes(model)
    if head is Head.LANGUAGE_MODEL:
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(billions * 1e9, rel=0.01)
