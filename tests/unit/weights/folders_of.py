"""Write Hugging Face folders of random tensors without transformers, and read and compare them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.models.parameters import Head, hf_shapes
from mindspeed_rlxf.weights.chunks import Chunk, StoredTensor

# The vocabulary is odd, so that tensor-parallel ranks have to pad.
BASE: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 8,
    "num_query_groups": 4, "kv_channels": 6, "vocab_size": 37, "max_position_embeddings": 64,
    "untie_embeddings_and_output_weights": True,
}  # fmt: skip
MOE: dict[str, Any] = {"num_experts": 4, "moe_router_topk": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"untie_embeddings_and_output_weights": False},
    "qwen2": {"add_qkv_bias": True},
    "qwen3": {"qk_layernorm": True},
    "qwen3_moe": MOE
    | {"qk_layernorm": True, "moe_ffn_hidden_size": 16, "moe_router_pre_softmax": True},
    "mixtral": MOE | {"moe_ffn_hidden_size": 24},
}
CLASSES = {"qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "mixtral": "Mixtral"}


def architecture_of(family: str, **keys: Any) -> ArchitectureConfig:
    """Return a small architecture of a family. keys: fields to change"""
    return ArchitectureConfig(**(BASE | FAMILIES[family] | keys))


def hf_config(family: str, a: ArchitectureConfig, head: Head) -> dict[str, Any]:
    """Return the config.json that transformers writes for a model."""
    ending = "ForCausalLM" if head is Head.LANGUAGE_MODEL else "ForSequenceClassification"
    config = {
        "architectures": [CLASSES.get(family, "Llama") + ending],
        "model_type": "llama" if family == "tied" else family,
        "num_hidden_layers": a.num_layers,
        "hidden_size": a.hidden_size,
        "intermediate_size": a.ffn_hidden_size,
        "num_attention_heads": a.num_attention_heads,
        "num_key_value_heads": a.kv_heads,
        "head_dim": a.head_dim,
        "vocab_size": a.vocab_size,
        "max_position_embeddings": a.max_position_embeddings,
        "rms_norm_eps": a.norm_epsilon,
        "tie_word_embeddings": not a.untie_embeddings_and_output_weights,
        "torch_dtype": "bfloat16",
    }
    if a.num_experts is not None:
        config |= {"num_experts_per_tok": a.moe_router_topk}
        moe = family == "qwen3_moe"
        config |= {"num_experts" if moe else "num_local_experts": a.num_experts}
        config |= {"moe_intermediate_size": a.mlp_hidden_size} if moe else {}
    return config


def make_folder(
    folder: Path, family: str, head: Head = Head.LANGUAGE_MODEL, shards: int = 1, **keys: Any
) -> dict[str, Tensor]:
    """Write a folder with norms in fp32 and the rest in bf16; return its tensors.

    shards: number of files; keys: fields of the architecture to change. The tokenizer is empty.
    """
    a = architecture_of(family, **keys)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator).to(
            torch.float32 if "norm" in name else torch.bfloat16
        )
        for name, shape in hf_shapes(a, head).items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        names, weight_map = list(tensors), {}
        for number in range(shards):
            file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
            save_file({n: tensors[n] for n in names[number::shards]}, folder / file)
            weight_map |= dict.fromkeys(names[number::shards], file)
        index = json.dumps({"weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    config = json.dumps(hf_config(family, a, head))
    (folder / "config.json").write_text(config, encoding="utf-8")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    return tensors


@contextmanager
def sizes_read() -> Iterator[list[int]]:
    """Inside, note the bytes of each chunk that is read, not of its parts."""
    sizes: list[int] = []
    read, depth = StoredTensor.read, 0

    def noting(self: StoredTensor, chunk: Chunk) -> Tensor:
        nonlocal depth
        depth += 1
        found = read(self, chunk)
        depth -= 1
        if depth == 0:
            sizes.append(found.nbytes)
        return found

    with mock.patch.object(StoredTensor, "read", noting):
        yield sizes


def read_folder(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of the safetensors files of a folder, by name."""
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Assert that names, dtypes and every bit of the tensors are the same."""
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name
