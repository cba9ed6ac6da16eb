"""Read the architecture of a Hugging Face config.json, in Megatron's names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mindspeed_rlxf.config.architecture import (
    MOST_EXPERTS,
    MOST_LAYERS,
    MOST_POSITIONS,
    MOST_TOKENS,
    MOST_WIDTH,
)
from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.config.suggest import shorten_value
from mindspeed_rlxf.files.plain import parse_json
from mindspeed_rlxf.files.safe import read_inside

FAMILIES = {
    "llama": {"add_qkv_bias": False, "qk_layernorm": False},
    "qwen2": {"add_qkv_bias": True, "qk_layernorm": False},
    "qwen3": {"add_qkv_bias": False, "qk_layernorm": True},
    "qwen3_moe": {"add_qkv_bias": False, "qk_layernorm": True},
    "mixtral": {"add_qkv_bias": False, "qk_layernorm": False},
}
"""Supported model_type -> fields of ArchitectureConfig that its config.json does not have."""

HEAD_DIM = {"qwen3": 128}
"""model_type -> head_dim where config.json has none; for other types hidden_size / heads."""


MOST = {
    "num_hidden_layers": MOST_LAYERS,
    **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok"), MOST_EXPERTS),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), MOST_WIDTH),
    **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), MOST_WIDTH),
    "head_dim": MOST_WIDTH,
    "rope_theta": 2**100,
    "rms_norm_eps": 1,
    "vocab_size": MOST_TOKENS,
    **dict.fromkeys(("max_position_embeddings", "sliding_window"), MOST_POSITIONS),
}
"""The largest value of each size in a config.json."""

COMPARED = ("max_position_embeddings", "sliding_window")
"""Sizes that are compared with others before any check of types."""

RESOLVED = {
    "num_query_groups": "kv_heads",
    "kv_channels": "head_dim",
    "moe_ffn_hidden_size": "mlp_hidden_size",
}
"""Fields that may be null -> the property with the number that null stands for."""

OF_MODEL = "the folder of a Hugging Face model"
OF_WEIGHTS = f"{OF_MODEL}, or of Megatron's weights and a config.json"


def read_hf_config(folder: Path, wanted: str = OF_MODEL) -> dict[str, Any]:
    """Return the content of config.json of a Hugging Face folder, checked by `find_bad_fields`.

    wanted: the kind of folder that the user should give, for messages
    Errors: ValueError when the folder or file is missing, the file is a link out of the folder, too
    large or no JSON object, or a field is bad (only the first one is named).
    """
    path = folder / "config.json"
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give {wanted}")
    try:
        text = read_inside(folder, path.name)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; give {wanted}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); give a folder") from None
    try:
        config = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); copy it again") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a JSON object ({type(config).__name__}); copy it again")
    if found := next(find_bad_fields(config), None):
        raise ValueError(f"config.json: a field has a wrong type or size ({found}); correct it")
    return config


def find_bad_fields(config: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each number of MOST outside 0 to its bound, and each field of a wrong type.

    Types: COMPARED numbers, rope_* objects, model_type and hidden_act text, architectures a list of
    texts. Fields of nested `*_config` objects are checked too. Absent fields are fine; text in
    place of other numbers is left to later checks. Bounds keep later code from allocating a list
    per layer, or a table per token, of a false number.
    """
    for name, most in MOST.items():
        value = config.get(name)
        if isinstance(value, (int, float)) and not 0 <= value <= most:
            yield f"{name} must be a number from 0 to {most}, not {shorten_value(value)}"
    for name in COMPARED:
        if not isinstance(config.get(name), (int, float, type(None))):
            yield f"{name} must be a number or null, not {shorten_value(config[name])}"
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(name), (dict, type(None))):
            yield f"{name} must be an object, not {shorten_value(config[name])}"
    for name in ("model_type", "hidden_act"):
        if not isinstance(config.get(name), (str, type(None))):
            yield f"{name} must be text, not {shorten_value(config[name])}"
    for name, part in config.items():
        if name.endswith("_config") and isinstance(part, dict):  # of a model of several parts
            yield from (f"{name}: {found}" for found in find_bad_fields(part))
    kinds = config.get("architectures")
    if kinds is not None and not (isinstance(kinds, list) and all(type(k) is str for k in kinds)):
        yield f"architectures must be a list of names, not {shorten_value(kinds)}"


def parse_architecture(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json by their names in ArchitectureConfig.

    None = config.json has no value, and `_dense_fields` no default. Keys of scaling are absent
    without scaling, and those of experts but `num_experts` in a dense model. The model type is not
    checked; any but qwen3_moe and mixtral counts as dense.
    Errors: ValueError when a field has a type that it cannot be computed from; a field that is only
    renamed is returned with any type.
    """
    try:
        return _dense_fields(config) | _expert_fields(config)
    except (TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise ValueError(f"config.json: a field has a wrong type ({error}); correct it") from None


def _dense_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of attention, MLP and embeddings, named as in ArchitectureConfig.

    Absent fields are None, except these with a default: key-value heads, head width, rotary base
    (10000 for every family), untied embeddings. Bias and norm of queries and keys come from
    FAMILIES. Scaling keys are only there with scaling, three of them only for llama3. transformers
    5 nests rotary settings in `rope_parameters`; older files have `rope_theta` and `rope_scaling`
    at the top.
    config: a config.json
    """
    family, heads = str(config.get("model_type")), config.get("num_attention_heads")
    head_dim = config.get("head_dim") or HEAD_DIM.get(family)
    if not head_dim and heads and config.get("hidden_size"):
        head_dim = config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or rope
    kind = scaling.get("rope_type", scaling.get("type", "default"))
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
        "rope_scaling_type": None if kind == "default" else kind,
    }
    if kind != "default":
        fields["rope_scaling_factor"] = scaling.get("factor")
    if kind == "llama3":
        names = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        fields |= {name: scaling.get(name) for name in names}
    return fields


def _expert_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of experts of a config.json, named as in ArchitectureConfig.

    {"num_experts": None} for a model_type other than qwen3_moe and mixtral; else number, top-k,
    width and whether softmax comes before top-k (qwen3_moe without `norm_topk_prob`). Absent fields
    are None. transformers 5 writes `num_local_experts` for both families with experts.
    """
    family = config.get("model_type")
    if family not in ("qwen3_moe", "mixtral"):
        return {"num_experts": None}
    width = "moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"
    return {
        "num_experts": config.get("num_experts") or config.get("num_local_experts"),
        "moe_router_topk": config.get("num_experts_per_tok"),
        "moe_ffn_hidden_size": config.get(width),
        "moe_router_pre_softmax": family == "qwen3_moe" and not config.get("norm_topk_prob"),
    }


def find_unsupported(config: dict[str, Any]) -> list[str]:
    """List settings of a config.json that this package does not support; [] = all supported.

    Each as `name: supported value, value in config.json`. Where one of these is wrong, the first of
    them is the only item: model_type, biases, hidden_act (silu), use_sliding_window. Else all of:
    a Mixtral `sliding_window` below the context, sparse steps, router noise, dense layers, shared
    experts.
    """
    if config.get("model_type") not in FAMILIES:
        return [f"model_type: one of {', '.join(FAMILIES)}, {config.get('model_type')}"]
    if config.get("attention_bias") or config.get("mlp_bias"):
        return ["attention_bias/mlp_bias: false, true"]
    if config.get("hidden_act", "silu") != "silu":
        return [f"hidden_act: silu, {config['hidden_act']}"]
    if config.get("use_sliding_window"):
        return ["use_sliding_window: false, true"]
    window, longest = config.get("sliding_window"), config.get("max_position_embeddings")
    is_cut = config["model_type"] == "mixtral" and window and longest and window < longest
    only = {"decoder_sparse_step": 1, "router_jitter_noise": 0.0, "mlp_only_layers": []}
    shared = ("shared_expert_intermediate_size", "n_shared_experts")
    return [
        *([f"sliding_window: null or at least {longest}, {window}"] if is_cut else []),
        *(
            f"{name}: {possible}, {config[name]}"
            for name, possible in only.items()
            if config.get(name) not in (None, possible)
        ),
        *(f"{name}: none, {config[name]}" for name in shared if config.get(name)),
    ]


def find_disagreements(
    architecture: ArchitectureConfig, config: dict[str, Any], scored: bool
) -> list[str]:
    """List fields in which the model YAML and config.json differ, as `name: yaml, config.json`.

    If config.json has settings that `find_unsupported` lists, return those alone.
    A field for which `parse_architecture` has None differs from every value but null.
    `max_position_embeddings` may be smaller in the YAML, which changes no result.
    scored: the role has a score head in place of the output layer, so tying does not matter
    """
    if found := find_unsupported(config):
        return found
    for name, theirs in parse_architecture(config).items():
        ours = getattr(architecture, RESOLVED.get(name, name))
        ours = getattr(ours, "value", ours)
        may_differ = scored and name == "untie_embeddings_and_output_weights"
        if name == "max_position_embeddings" and theirs is not None:
            may_differ = ours <= theirs
        if ours != theirs and not may_differ:
            found.append(f"{name}: {ours}, {theirs}")
    return found
