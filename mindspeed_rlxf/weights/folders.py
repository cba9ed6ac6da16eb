"""Open weight folders in any format, and copy a model's side files."""

import json
from pathlib import Path
from typing import Any

import torch

from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.models.parameters import Head
from mindspeed_rlxf.weights.atomic import replace_file
from mindspeed_rlxf.weights.chunks import StoredWeights
from mindspeed_rlxf.weights.formats import Format, find_weights
from mindspeed_rlxf.weights.hf_folder import open_hf_folder
from mindspeed_rlxf.weights.legacy import read_legacy
from mindspeed_rlxf.weights.role_state import WEIGHT, read_states
from mindspeed_rlxf.weights.torch_dist import read_metadata_tensors, read_torch_dist

CONFIG = "config.json"
SIDE_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def find_description(weights: str | Path, tokenizer: str | Path) -> Path:
    """Return the folder whose config.json and generation_config.json describe the weights.

    The weight folder if it has a config.json or Hugging Face format, else the tokenizer's.

    Raises:
        ValueError: neither has a config.json, or `find_weights` fails.
    """
    weights, tokenizer = Path(weights), Path(tokenizer)
    if (weights / CONFIG).exists() or find_weights(weights)[0] is Format.HF:
        return weights
    if (tokenizer / CONFIG).exists():
        return tokenizer
    raise ValueError(
        f"{CONFIG} is neither in it nor in training.tokenizer_name_or_path={tokenizer}; copy that "
        "of the Hugging Face model into either"
    )


def open_weights(
    folder: str | Path, architecture: ArchitectureConfig, trust_files: bool = False
) -> StoredWeights:
    """Open a weight folder in any format; chunks are read later.

    `trust_files` reads pickled files with an old torch too (`pickled.read_torch_file`).

    Raises:
        ValueError: missing or damaged files, code in files, or another model.
        OSError: an unreadable tracker file or run checkpoint.
    """
    kind, weights = find_weights(Path(folder))
    if kind is Format.RUN_STATE:
        return read_states(weights)[WEIGHT]
    if kind is Format.LEGACY:
        return read_legacy(weights, architecture, trust_files)
    if kind is Format.TORCH_DIST:
        return read_torch_dist(weights, read_metadata_tensors(weights, trust_files), architecture)
    return open_hf_folder(folder, trust_files)


def copy_side_files(
    source: Path, target: Path, head: Head, dtype: torch.dtype | None = None, config: Any = None
) -> list[Path]:
    """Copy config.json and all SIDE_FILES from `source`; return the new paths.

    For a score head, the new config.json names a classifier with one label; `dtype` goes in too.
    `config` replaces what is in the file.
    """
    config = config or json.loads((source / CONFIG).read_bytes())
    if head is Head.SCORE:
        kind = (config.get("architectures") or ["LlamaForCausalLM"])[0].split("For")[0]
        config["architectures"] = [f"{kind}ForSequenceClassification"]
        config["num_labels"] = 1
        config["id2label"] = {"0": "LABEL_0"}
        config["label2id"] = {"LABEL_0": 0}
    if dtype is not None:
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        config[key] = str(dtype).removeprefix("torch.")
    replace_file(target / CONFIG, json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    side_files = [file for file in SIDE_FILES if (source / file).exists()]
    for file in side_files:
        replace_file(target / file, (source / file).read_bytes())
    return [target / file for file in (CONFIG, *side_files)]
