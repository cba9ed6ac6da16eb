"""config.json of transformers 5 and of older versions, and what disagrees with the YAML."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import LlamaConfig, MixtralConfig, Qwen3MoeConfig

from mindspeed_rlxf.config.hf_config import find_disagreements, read_hf_config
from mindspeed_rlxf.config.schema import ArchitectureConfig

VERSION_5 = int(transformers.__version__.split(".")[0]) >= 5
LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LLAMA3_KEYS = {
    "rope_scaling_type": "llama3",
    "rope_scaling_factor": 8.0,
    "original_max_position_embeddings": 64,
}


def architecture(**keys: Any) -> ArchitectureConfig:
    base: dict[str, Any] = {
        "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4,
        "num_query_groups": 2, "vocab_size": 99, "max_position_embeddings": 512,
        "rotary_base": 500000.0, "norm_epsilon": 1e-6, "untie_embeddings_and_output_weights": True,
    }  # fmt: skip
    return ArchitectureConfig(**(base | keys))


def older(**keys: Any) -> dict[str, Any]:
    """As transformers 4 wrote it: no head_dim, rope_theta at the top."""
    base: dict[str, Any] = {
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 99,
        "max_position_embeddings": 512, "rope_theta": 500000.0, "rope_scaling": None,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu",
    }  # fmt: skip
    return base | keys


def newer(rope: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    """As transformers 5 writes it."""
    base = older(head_dim=8)
    for name in ("rope_theta", "rope_scaling"):
        del base[name]
    parameters = {"rope_theta": 500000.0, **(rope or {"rope_type": "default"})}
    return base | {"rope_parameters": parameters} | keys


@pytest.mark.parametrize("rope", [None, LLAMA3_ROPE], ids=["plain", "llama3"])
def test_config_of_the_installed_transformers_agrees(rope: dict[str, Any] | None) -> None:
    config = older(rope_scaling=rope)
    del config["model_type"]  # the class's own
    written = json.loads(LlamaConfig(**config).to_json_string())
    assert ("rope_parameters" in written, "rope_theta" in written) == (VERSION_5, not VERSION_5)
    ours = architecture(**(LLAMA3_KEYS if rope else {}))
    assert find_disagreements(ours, written, scored=False) == []


LINEAR = {"rope_scaling_type": "linear", "rope_scaling_factor": 2.0}
AGREEING: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, newer()),
    ({}, older()),
    ({"num_query_groups": None}, older(num_key_value_heads=None)),  # one per query head
    (LINEAR, older(rope_scaling={"type": "linear", "factor": 2.0})),  # the oldest spelling
    ({"max_position_embeddings": 64}, older()),  # a YAML may allow shorter sequences
    ({"qk_layernorm": True, "kv_channels": 128}, older(model_type="qwen3")),
    ({"qk_layernorm": True, "kv_channels": 16}, older(model_type="qwen3", head_dim=16)),
]


@pytest.mark.parametrize(("ours", "config"), AGREEING)
def test_a_config_that_says_the_same_agrees(ours: dict[str, Any], config: dict[str, Any]) -> None:
    assert find_disagreements(architecture(**ours), config, scored=False) == []


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"num_layers": 4}, "num_layers: 4, 2"),
        ({"ffn_hidden_size": 64}, "ffn_hidden_size: 64, 48"),
        ({"num_query_groups": None}, "num_query_groups: 4, 2"),
        ({"kv_channels": 16}, "kv_channels: 16, 8"),
        ({"vocab_size": 100}, "vocab_size: 100, 99"),
        ({"rotary_base": 10000.0}, "rotary_base: 10000.0, 500000.0"),
        ({"norm_epsilon": 1e-5}, "norm_epsilon: 1e-05, 1e-06"),
        ({"max_position_embeddings": 1024}, "max_position_embeddings: 1024, 512"),
        ({"num_experts": 4}, "num_experts: 4, None"),
        ({"add_qkv_bias": True}, "add_qkv_bias: True, False"),
        ({"qk_layernorm": True}, "qk_layernorm: True, False"),
        ({"untie_embeddings_and_output_weights": False},
         "untie_embeddings_and_output_weights: False, True"),
    ],
)  # fmt: skip
def test_each_field_that_differs_is_named_with_both_values(keys: dict[str, Any], line: str) -> None:
    for config in (newer(), older()):
        assert find_disagreements(architecture(**keys), config, scored=False) == [line]


def test_tying_does_not_matter_to_a_score_head() -> None:
    tied = newer(tie_word_embeddings=True)
    assert find_disagreements(architecture(), tied, scored=False)
    assert find_disagreements(architecture(), tied, scored=True) == []


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"model_type": "gemma"},
         "model_type: one of llama, qwen2, qwen3, qwen3_moe, mixtral, gemma"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window: False, True"),
        ({"attention_bias": True}, "attention_bias: False, True"),
        ({"hidden_act": "gelu"}, "hidden_act: silu, gelu"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling_type: None, dynamic"),
        ({"model_type": "mixtral", "sliding_window": 256},
         "sliding_window: null or at least 512, 256"),
        ({"model_type": "mixtral", "router_jitter_noise": 0.1}, "router_jitter_noise: 0.0, 0.1"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "decoder_sparse_step: 1, 2"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, "mlp_only_layers: [], [0]"),
        ({"model_type": "qwen3_moe", "shared_expert_intermediate_size": 8},
         "shared_expert_intermediate_size: 0, 8"),
    ],
)  # fmt: skip
def test_an_unsupported_field_of_config_json_is_named(keys: dict[str, Any], line: str) -> None:
    assert line in find_disagreements(architecture(), older(**keys), scored=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"config\.json is missing; give the folder"),
        ("{", r"config\.json is not valid JSON .*; copy it again"),
        ("[1]", r"config\.json is not a JSON object .*; copy it again"),
    ],
)
def test_a_broken_config_is_the_users_error(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_hf_config(tmp_path)


EXPERTS = {"num_experts": 4, "moe_router_topk": 3}


@pytest.mark.parametrize("normed", [True, False])
def test_a_qwen3_moe_is_read_in_both_spellings(normed: bool) -> None:
    keys = {"num_experts_per_tok": 3, "moe_intermediate_size": 20, "norm_topk_prob": normed}
    published = older(model_type="qwen3_moe", head_dim=16, num_experts=4, **keys)
    saved = json.loads(Qwen3MoeConfig(**published).to_json_string())
    assert ("num_experts" in saved) is not VERSION_5  # which saves another name
    ours = {"qk_layernorm": True, "kv_channels": 16, "moe_ffn_hidden_size": 20, **EXPERTS}
    ours["moe_router_pre_softmax"] = not normed
    for config in (published, saved | {"rope_theta": 500000.0, "rope_parameters": None}):
        assert find_disagreements(architecture(**ours), config, scored=False) == []
    wrong = {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": None}
    wrong["moe_router_pre_softmax"] = normed
    assert find_disagreements(architecture(**(ours | wrong)), published, scored=False) == [
        "num_experts: 8, 4",
        "moe_router_topk: 2, 3",
        "moe_ffn_hidden_size: 48, 20",
        f"moe_router_pre_softmax: {normed}, {not normed}",
    ]


def test_a_mixtral_has_experts_as_wide_as_a_dense_mlp() -> None:
    published = older(model_type="mixtral", num_local_experts=4, num_experts_per_tok=3)
    published["sliding_window"] = 512  # as long as the model's sequences: no window
    saved = json.loads(MixtralConfig(**published).to_json_string())
    for config in (published, saved | {"rope_theta": 500000.0, "rope_parameters": None}):
        assert find_disagreements(architecture(**EXPERTS), config, scored=False) == []
        assert find_disagreements(architecture(), config, scored=False) == [
            "num_experts: None, 4",
            "moe_router_topk: 2, 3",
        ]
