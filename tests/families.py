"""The classes of transformers for each model family: configuration, language model, scorer."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed_rlxf.config.schema import ArchitectureConfig


@dataclass(frozen=True)
class Family:
    """Unpacks to the three classes, which are imported only then: that takes some seconds."""

    name: str

    def __iter__(self) -> Iterator[Any]:
        import transformers

        for kind in ("Config", "ForCausalLM", "ForSequenceClassification"):
            yield getattr(transformers, f"{self.name}{kind}")


LLAMA = Family("Llama")
QWEN2 = Family("Qwen2")
QWEN3 = Family("Qwen3")
QWEN3_MOE = Family("Qwen3Moe")
MIXTRAL = Family("Mixtral")


def family_of(architecture: ArchitectureConfig) -> Family:
    """Return the classes of the family that has the features of the architecture."""
    if architecture.num_experts is not None:
        return QWEN3_MOE if architecture.qk_layernorm else MIXTRAL
    if architecture.add_qkv_bias:
        return QWEN2
    return QWEN3 if architecture.qk_layernorm else LLAMA


def config_keys(a: ArchitectureConfig) -> dict[str, Any]:
    """Return the architecture as keyword arguments of the family's configuration class."""
    keys = {
        "num_hidden_layers": a.num_layers,
        "hidden_size": a.hidden_size,
        "intermediate_size": a.ffn_hidden_size,
        "num_attention_heads": a.num_attention_heads,
        "num_key_value_heads": a.kv_heads,
        "head_dim": a.head_dim,
        "vocab_size": a.vocab_size,
        "tie_word_embeddings": not a.untie_embeddings_and_output_weights,
        "num_labels": 1,
        "pad_token_id": 0,
    }
    if a.num_experts is None:
        return keys
    keys |= {"num_experts_per_tok": a.moe_router_topk}
    if a.qk_layernorm:
        keys |= {"num_experts": a.num_experts, "moe_intermediate_size": a.mlp_hidden_size}
        keys |= {"norm_topk_prob": not a.moe_router_pre_softmax}
    else:
        keys |= {"num_local_experts": a.num_experts}
    return keys


def stored_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Return name and shape of each tensor that `save_pretrained` writes for the model.

    transformers 5 keeps the experts of a layer in one stacked tensor in memory; files have one
    matrix per expert, as transformers 4 also has in memory. Checked against a saved folder by
    `test_a_saved_folder_has_the_names_of_stored_shapes`.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    mixtral = model.config.model_type == "mixtral"
    block = "block_sparse_moe" if mixtral else "mlp"
    # named_parameters leaves out the second name of a tied weight, as a file does
    for name, parameter in model.named_parameters():
        layer, found, rest = name.partition(".mlp.")
        stacked = rest.startswith("experts.") and parameter.dim() == 3
        if not found or (rest != "gate.weight" and not stacked):
            shapes[name] = tuple(parameter.shape)
        elif rest == "gate.weight":
            shapes[f"{layer}.{block}.gate.weight"] = tuple(parameter.shape)
        else:
            count, rows, columns = parameter.shape
            both = rest == "experts.gate_up_proj"
            names = ("w1", "w3") if mixtral else ("gate_proj", "up_proj")
            if not both:
                names = ("w2",) if mixtral else ("down_proj",)
            for expert in range(count):
                for part in names:
                    key = f"{layer}.{block}.experts.{expert}.{part}.weight"
                    shapes[key] = (rows // len(names), columns)
    return shapes


def on_meta(model_class: Any, config: Any) -> Any:
    """Return a model on torch's meta device: shapes without storage."""
    with torch.device("meta"):
        return model_class(config)
