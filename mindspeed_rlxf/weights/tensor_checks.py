"""Check that a folder's tensors are a model's weights: all of them, in full precision, no others.

A tensor that is left out, or read without its scales, trains another model than the one given.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.models.parameters import EMBEDDING, OUTPUT_LAYER, Head
from mindspeed_rlxf.weights.chunks import (
    IGNORED,
    Shape,
    StoredTensor,
    StoredWeights,
    is_full_precision,
    whole,
)
from mindspeed_rlxf.weights.hf_folder import shape_problems

COMPARED_ELEMENTS = 1 << 24  # of two tensors at a time

SCALES = re.compile(r"(scale|scales|scale_inv|SCB|absmax|qweight|qzeros|packed|blocks)$")
"""Ends of names that quantized checkpoints have beside, or in place of, their weights."""

OTHER_HEADS = {
    Head.LANGUAGE_MODEL: re.compile(r"^(score|v_head|rm_head)\."),
    Head.SCORE: re.compile(r"^lm_head\.|^(score|rm_head)\.bias$"),
}
"""Output layers that a model with this head does not use."""

NEXT_TOKENS = re.compile(r"^(model\.)?mtp\.")
"""Layers that predict further tokens; they are not trained."""

FULL_WEIGHTS = (
    "let transformers write full weights: from_pretrained(FOLDER).dequantize(), for FP8 "
    "from_pretrained with dequantize=True; docs/models_and_weights.md has the program"
)


def tied_names(architecture: ArchitectureConfig, head: Head) -> dict[str, str]:
    """Return each tensor that files may have beside a tied one -> the one that it must equal."""
    if head is Head.SCORE or architecture.untie_embeddings_and_output_weights:
        return {}
    return {OUTPUT_LAYER.sources[0]: EMBEDDING.sources[0]}


def tensor_problems(
    folder: str | Path,
    weights: StoredWeights,
    expected: Mapping[str, Shape],
    head: Head,
    tied: Mapping[str, str],
    ignored: Sequence[str] = (),
) -> list[str]:
    """Return a line per tensor that is missing, misshapen or not in the model.

    Permitted beside the model's are heads of other models (OTHER_HEADS), layers that predict
    further tokens, rotary frequencies and buffers of integers. Reads headers only, except of `tied`
    tensors that are there.

    Args:
        folder: For messages.
        weights: The folder's tensors.
        expected: Shapes of the model's weights by name.
        head: The model's head.
        tied: See `tied_names`.
        ignored: Patterns of further names that are permitted.

    Raises:
        ValueError: Quantized weights, or a tied tensor with other elements.
    """
    rule = find_quantized(folder, weights, expected)
    if rule is not None:
        raise ValueError(rule)
    _refuse_untied(folder, weights, tied)
    permitted = [IGNORED, OTHER_HEADS[head], NEXT_TOKENS, *map(re.compile, ignored)]
    problems = shape_problems(weights, expected)
    for name in sorted(weights):
        if name in expected or name in tied:
            continue
        is_permitted = any(pattern.search(name) for pattern in permitted)
        if weights[name].dtype.is_floating_point and not is_permitted:
            problems.append(f"{name} is not in the model")
    return problems


def find_quantized(folder: str | Path, weights: StoredWeights, names: Iterable[str]) -> str | None:
    """Return why the tensors `names` are no weights as they stand, None if they are.

    The folder's other tensors are searched for scales.
    """
    used = [name for name in names if name in weights]
    unused = sorted(set(weights) - set(used))
    quantized = [name for name in used if not is_full_precision(weights[name].dtype)]
    quantized += [name for name in unused if SCALES.search(name)]
    if not quantized:
        return None
    name = quantized[0]
    example = f"{name} is {str(weights[name].dtype).removeprefix('torch.')}"
    return f"{folder} holds quantized weights ({example}), which are not read; {FULL_WEIGHTS}"


def _refuse_untied(folder: str | Path, weights: StoredWeights, tied: Mapping[str, str]) -> None:
    for name, source in tied.items():
        if name in weights and source in weights and not _equal(weights[name], weights[source]):
            raise ValueError(
                f"{folder}: config.json ties {name} to {source} (tie_word_embeddings), but the "
                f"files have another {name}; set tie_word_embeddings=false there to use it, or "
                "remove it from the files"
            )


def _equal(one: StoredTensor, other: StoredTensor) -> bool:
    if one.shape != other.shape:
        return False
    for chunk in whole(one.shape).split(COMPARED_ELEMENTS):
        if not torch.equal(one.read(chunk).float(), other.read(chunk).float()):
            return False
    return True
