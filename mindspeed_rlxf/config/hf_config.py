"""Read the architecture in a Hugging Face config.json, in Megatron's names."""

import json
from pathlib import Path
from typing import Any

from mindspeed_rlxf.config.schema import ArchitectureConfig

FAMILIES = {
    "llama": {"add_qkv_bias": False, "qk_layernorm": False},
    "qwen2": {"add_qkv_bias": True, "qk_layernorm": False},
    "qwen3": {"add_qkv_bias": False, "qk_layernorm": True},
    "qwen3_moe": {"add_qkv_bias": False, "qk_layernorm": True},
    "mixtral": {"add_qkv_bias": False, "qk_layernorm": False},
}
"""Supported model_type -> ArchitectureConfig fields missing in its config.json."""

SUPPORTED: dict[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "use_sliding_window": False,
    "decoder_sparse_step": 1,
    "router_jitter_noise": 0.0,
    "mlp_only_layers": [],
    "shared_expert_intermediate_size": 0,
    "n_shared_experts": 0,
}
"""Field of config.json -> the only value that the models here support; an absent field has it."""

PROPERTY_OF_NULLABLE = {
    "num_query_groups": "kv_heads",
    "kv_channels": "head_dim",
    "moe_ffn_hidden_size": "mlp_hidden_size",
}
"""Field that may be null in ArchitectureConfig -> its property with the number meant by null."""

MODEL_FOLDER = "the folder of a Hugging Face model"
WEIGHTS_FOLDER = f"{MODEL_FOLDER}, or of Megatron's weights and a config.json"


def read_hf_config(folder: Path, folder_kind: str = MODEL_FOLDER) -> dict[str, Any]:
    """Return the content of config.json in a Hugging Face folder.

    Args:
        folder: Folder to read.
        folder_kind: Kind of folder to ask the user for, in messages.

    Raises:
        ValueError: The file is missing or is no JSON object with names of architectures.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{path} is missing; give {folder_kind}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); copy it again") from None
    names = (config.get("architectures") or []) if isinstance(config, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path} is not a JSON object with `architectures`; copy it again")
    return dict(config)


def parse_architecture(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json's fields by their names in ArchitectureConfig.

    {"num_hidden_layers": 24, "rope_theta": 1e6, ...} gives {"num_layers": 24, "rotary_base": 1e6,
    ...}. None = config.json has no value, and there is no default. Scaling keys are absent without
    scaling, expert keys but `num_experts` in a dense model. The model type is not checked; any but
    qwen3_moe and mixtral counts as dense.

    Raises:
        ValueError: A field has the wrong type for a computation. Renamed fields are returned with
            any type.
    """
    try:
        return _parse_fields(config)
    except (TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise ValueError(f"config.json: a field has a wrong type ({error}); correct it") from None


def _parse_fields(config: dict[str, Any]) -> dict[str, Any]:
    family = str(config.get("model_type"))
    heads = config.get("num_attention_heads")
    head_dim = config.get("head_dim") or (128 if family == "qwen3" else None)
    if not head_dim and heads and config.get("hidden_size"):
        head_dim = config["hidden_size"] // heads
    # transformers 5 nests rotary settings; older files have `rope_theta` and `rope_scaling`.
    rope = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or rope
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    fields = {
        "num_layers": config.get("num_hidden_layers"),
        "hidden_size": config.get("hidden_size"),
        "ffn_hidden_size": config.get("intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": config.get("num_key_value_heads") or heads,
        "kv_channels": head_dim,
        **FAMILIES.get(family, {}),
        "vocab_size": config.get("vocab_size"),
        "max_position_embeddings": config.get("max_position_embeddings"),
        "rotary_base": float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        "norm_epsilon": config.get("rms_norm_eps"),
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        "rope_scaling_type": None if rope_type == "default" else rope_type,
        "num_experts": None,
    }
    if rope_type != "default":
        fields["rope_scaling_factor"] = scaling.get("factor")
    if rope_type == "llama3":
        names = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        fields |= {name: scaling.get(name) for name in names}
    if family in ("qwen3_moe", "mixtral"):
        width_key = "moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"
        fields |= {
            # transformers 5 writes `num_local_experts` for both families.
            "num_experts": config.get("num_experts") or config.get("num_local_experts"),
            "moe_router_topk": config.get("num_experts_per_tok"),
            "moe_ffn_hidden_size": config.get(width_key),
            "moe_router_pre_softmax": family == "qwen3_moe" and not config.get("norm_topk_prob"),
        }
    return fields


def read_text_config(folder: Path) -> Any:
    """Return transformers' configuration of the language model in a Hugging Face folder.

    Raises:
        ValueError: transformers does not know the model, or has no language model of its kind.
    """
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    model_type = read_hf_config(folder).get("model_type")
    if model_type not in CONFIG_MAPPING:
        rule = f"config.json must be of a model that transformers knows, not {model_type}"
        raise ValueError(f"{rule}; use another model, or a newer transformers")
    try:
        complete_config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, KeyError, TypeError, OSError) as error:
        text = " ".join(str(error).split())
        raise ValueError(f"transformers cannot read config.json ({text:.200})") from None
    language_models = AutoModelForCausalLM._model_mapping.keys()
    for config in (complete_config.get_text_config(), complete_config):
        if type(config) in language_models:
            return config
    raise ValueError(
        "config.json must be of a language model, transformers has none for "
        f"{complete_config.model_type}; use another model"
    )


def approximate_architecture(folder: Path) -> dict[str, Any]:
    """Return the sizes of any model that transformers knows, by their names in ArchitectureConfig.

    They are for checks and estimates: the model itself is built from config.json. Raises ValueError
    (`read_text_config`).
    """
    config = read_text_config(folder)

    def first(*names: str) -> Any:  # the names that families of models have for a size
        for name in names:
            value = getattr(config, name, None)
            if value:
                return value
        return None

    heads = first("num_attention_heads")
    hidden = first("hidden_size")
    head_dim = first("head_dim") or max(2, hidden // heads // 2 * 2)
    experts = first("num_local_experts", "num_experts", "n_routed_experts")
    fields = {
        "num_layers": first("num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": first("intermediate_size", "moe_intermediate_size") or 4 * hidden,
        "num_attention_heads": heads,
        "num_query_groups": first("num_key_value_heads"),
        "kv_channels": head_dim + head_dim % 2,  # even, for rotary embeddings
        "vocab_size": first("vocab_size"),
        "max_position_embeddings": first("max_position_embeddings"),
        "untie_embeddings_and_output_weights": not first("tie_word_embeddings"),
        "init_method_std": first("initializer_range"),
    }
    if experts:
        fields |= {
            "num_experts": experts,
            "moe_router_topk": first("num_experts_per_tok"),
            "moe_ffn_hidden_size": first("moe_intermediate_size"),
            "moe_router_pre_softmax": True,
        }
    return {name: value for name, value in fields.items() if value is not None}


def find_unsupported(config: dict[str, Any]) -> list[str]:
    """List unsupported settings in a config.json, as `name: supported value, found value`."""
    if str(config.get("model_type")) not in FAMILIES:
        return [f"model_type: one of {', '.join(FAMILIES)}, {config.get('model_type')}"]
    unsupported = []
    for name, possible in SUPPORTED.items():
        if config.get(name) not in (None, possible):
            unsupported.append(f"{name}: {possible}, {config[name]}")
    if config["model_type"] == "mixtral":
        window = config.get("sliding_window")
        longest = config.get("max_position_embeddings")
        if isinstance(window, int) and isinstance(longest, int) and 0 < window < longest:
            unsupported.append(f"sliding_window: null or at least {longest}, {window}")
    return unsupported


def find_disagreements(
    architecture: ArchitectureConfig, config: dict[str, Any], scored: bool
) -> list[str]:
    """List fields with different values in model YAML and config.json, as `name: ours, theirs`.

    Unsupported settings (`find_unsupported`) are returned alone. A field parsed as None differs
    from every value but null. `max_position_embeddings` may be smaller in the YAML: results stay
    the same.

    Args:
        architecture: From the model YAML.
        config: Content of config.json.
        scored: Whether a score head replaces the output layer, so tying does not matter.
    """
    unsupported = find_unsupported(config)
    if unsupported:
        return unsupported
    disagreements = []
    for name, hf_value in parse_architecture(config).items():
        yaml_value = getattr(architecture, PROPERTY_OF_NULLABLE.get(name, name))
        may_differ = scored and name == "untie_embeddings_and_output_weights"
        if name == "max_position_embeddings" and hf_value is not None:
            may_differ = yaml_value <= hf_value
        if yaml_value != hf_value and not may_differ:
            disagreements.append(f"{name}: {yaml_value}, {hf_value}")
    return disagreements
