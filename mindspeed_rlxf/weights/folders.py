"""Open folders of weights of any format, and copy the side files of a model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.files.plain import parse_json
from mindspeed_rlxf.files.safe import open_inside, read_inside, replace_file
from mindspeed_rlxf.models.parameters import Head
from mindspeed_rlxf.weights.boxes import BoxedWeights
from mindspeed_rlxf.weights.dist_metadata import Metadata
from mindspeed_rlxf.weights.formats import Format, find_weights
from mindspeed_rlxf.weights.hf_folder import HfFolder
from mindspeed_rlxf.weights.legacy import read_legacy
from mindspeed_rlxf.weights.role_state import WEIGHT, RunState
from mindspeed_rlxf.weights.torch_dist import read_torch_dist

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

    It is the folder of the weights if that has a config.json or the Hugging Face format, else the
    one of the tokenizer. Raises ValueError when that lacks a config.json too, and what
    `find_weights` raises.
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
) -> BoxedWeights:
    """Open the weights of a folder of any format; tensors are read later, box by box.

    trust_files: also read pickled files with an old torch, see `pickled.read_torch_file`
    Raises ValueError when something is missing or damaged; for a Megatron folder also when it has
    another model, or pickled objects other than data. OSError where the tracker file or a file of
    a run's checkpoint cannot be read.
    """
    kind, place = find_weights(Path(folder))
    if kind is Format.RUN_STATE:
        return RunState(place).slot(WEIGHT)
    if kind is Format.LEGACY:
        return read_legacy(place, architecture, trust_files)
    if kind is Format.TORCH_DIST:
        return read_torch_dist(Metadata(place, trust_files), architecture)
    return HfFolder(folder, trust_files)


def is_scorer(config: dict[str, Any]) -> bool:
    """Whether a config.json describes a model with a score head.

    By the name of its first architecture, which must end with ForSequenceClassification.
    """
    names = config.get("architectures") or [""]
    return str(names[0]).endswith("ForSequenceClassification")


def check_side_files(folder: Path) -> None:
    """Check that config.json and SIDE_FILES, where they exist, can be opened; reads nothing.

    Raises ValueError for one that cannot be, is no regular file or links out of the folder.
    """
    for name in (CONFIG, *SIDE_FILES):
        if os.path.lexists(folder / name):
            try:
                open_inside(folder, name).close()
            except OSError as error:
                rule = f"{folder / name} cannot be read ({error.strerror})"
                raise ValueError(f"{rule}; remove it or copy it again") from None


def copy_side_files(
    source: Path, target: Path, head: Head, dtype: torch.dtype | None = None
) -> list[Path]:
    """Copy config.json and those of SIDE_FILES that `source` has; return the paths of the copies.

    The copied config.json names a classifier of one label for a score head, and `dtype` if given.
    Raises ValueError or OSError where a file cannot be read or is a link out of `source`.
    """
    config = parse_json(read_inside(source, CONFIG))
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
        with open_inside(source, file) as stream:
            replace_file(target / file, stream.read())
    return [target / file for file in (CONFIG, *beside)]
