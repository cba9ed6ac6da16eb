"""Open folders of weights of any format, and copy the side files of a model."""

import json
from pathlib import Path

import torch

from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.models.parameters import Head
from mindspeed_rlxf.weights.atomic import replace_file
from mindspeed_rlxf.weights.chunks import StoredWeights
from mindspeed_rlxf.weights.formats import Format, find_weights
from mindspeed_rlxf.weights.hf_folder import open_hf_folder
from mindspeed_rlxf.weights.legacy import read_legacy
from mindspeed_rlxf.weights.role_state import WEIGHT, read_slots
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

    That of the weights if it has a config.json or the Hugging Face format, else the tokenizer's.
    Raises ValueError if that lacks a config.json too, and as `find_weights`.
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
    """Open the weights of a folder of any format; tensors are read later, chunk by chunk.

    `trust_files` reads pickled files with an old torch too (`pickled.read_torch_file`). Raises
    ValueError for what is missing, damaged, no data or of another model; OSError if the tracker
    file or a file of a run's checkpoint cannot be read.
    """
    kind, place = find_weights(Path(folder))
    if kind is Format.RUN_STATE:
        return read_slots(place)[WEIGHT]
    if kind is Format.LEGACY:
        return read_legacy(place, architecture, trust_files)
    if kind is Format.TORCH_DIST:
        return read_torch_dist(place, read_metadata_tensors(place, trust_files), architecture)
    return open_hf_folder(folder, trust_files)


def copy_side_files(
    source: Path, target: Path, head: Head, dtype: torch.dtype | None = None
) -> list[Path]:
    """Copy config.json and those of SIDE_FILES that `source` has; return the paths of the copies.

    The copied config.json names a classifier of one label for a score head, and `dtype` if given.
    """
    config = json.loads((source / CONFIG).read_bytes())
    if head is Head.SCORE:
        kind = (config.get("architectures") or ["LlamaForCausalLM"])[0].split("For")[0]
        config["architectures"] = [f"{kind}ForSequenceClassification"]
        config["num_labels"], config["id2label"] = 1, {"0": "LABEL_0"}
        config["label2id"] = {"LABEL_0": 0}
    if dtype is not None:
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        config[key] = str(dtype).removeprefix("torch.")
    replace_file(target / CONFIG, json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    beside = [file for file in SIDE_FILES if (source / file).exists()]
    for file in beside:
        replace_file(target / file, (source / file).read_bytes())
    return [target / file for file in (CONFIG, *beside)]
