"""Random tiny models of many families as Hugging Face folders."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from mindspeed_rlxf.config.hf_config import approximate_architecture
from mindspeed_rlxf.config.schema import ArchitectureConfig
from tests.distributed.llamas import VOCAB

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
    "initializer_range": 0.15,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 20}),
    "gemma2": ("Gemma2", {"sliding_window": 6, "attn_logit_softcapping": 2.0,
     "final_logit_softcapping": 1.5}),
    "deepseek_v3": ("DeepseekV3", {
        **EXPERTS, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4,
        "moe_intermediate_size": 20, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
        "n_shared_experts": 1}),
    "gpt_oss": ("GptOss", {**EXPERTS, "num_local_experts": 4, "sliding_window": 6}),
    "qwen3_5": ("Qwen3_5", {
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}),
    "opt": ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "phi3": ("Phi3", {"original_max_position_embeddings": 11, "rope_scaling": {
        "type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}}),
}  # fmt: skip
"""Name -> (class name in transformers, keys of its configuration beside SIZES)."""
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic": ("Llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    "qwen2_moe": ("Qwen2Moe", {
        **EXPERTS, "num_experts": 4, "moe_intermediate_size": 20, "use_sliding_window": True,
        "shared_expert_intermediate_size": 20, "sliding_window": 44}),
}  # fmt: skip
"""Models whose rows would be wrong."""
CLASSIFIERS = {"llama": "SequenceClassification", "gemma2": "TokenClassification"}
"""Families whose score head is that of a model of transformers."""


def wrap(source: Path, folder: Path) -> Path:
    """Write a model as part of one that also sees images; return its folder."""
    folder.mkdir()
    weights = load_file(source / "model.safetensors")
    wrapped = {n.replace("model.", "model.language_model.", 1): t for n, t in weights.items()}
    save_file(wrapped, folder / "model.safetensors", {"format": "pt"})
    text = json.loads((source / "config.json").read_text())
    whole = {"model_type": text["model_type"].removesuffix("_text"), "text_config": text}
    whole["architectures"] = [
        text.pop("architectures")[0].replace("CausalLM", "ConditionalGeneration")
    ]
    (folder / "config.json").write_text(json.dumps(whole))
    return folder


def make_family(folder: Path, name: str) -> tuple[Path, Path, ArchitectureConfig]:
    """Write a language model and one with a score head; return both folders and their sizes."""
    import transformers

    kind, keys = {**FAMILIES, **REFUSED}[name]
    config_class = getattr(transformers, f"{kind}TextConfig", None) or getattr(
        transformers, f"{kind}Config"
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_class(**{**SIZES, **keys}))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(("bias", "sinks")):
                parameter.uniform_(-1.0, 1.0)
    lm, scored = folder / "lm", folder / "scored"
    model.save_pretrained(lm)
    scorer = model
    if name in CLASSIFIERS:
        model.config.num_labels = 1
        scorer = getattr(transformers, f"AutoModelFor{CLASSIFIERS[name]}").from_config(model.config)
        scorer.model.load_state_dict(model.model.state_dict())
    scorer.save_pretrained(scored)
    weights = load_file(scored / "model.safetensors")
    weights.pop("lm_head.weight", None)
    weights["score.weight"] = torch.randn(1, SIZES["hidden_size"])
    save_file(weights, scored / "model.safetensors", {"format": "pt"})
    fields = approximate_architecture(lm)
    return lm, scored, ArchitectureConfig(**fields)
