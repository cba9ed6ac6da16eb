"""Readers of weights: boxes of tensors by Hugging Face names, whatever the folder holds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.models.parameters import (
    OUTPUT_LAYER,
    RM_HEAD,
    SCORE_HEAD,
    Split,
    StageParameter,
    hf_shape,
    shard_shape,
)
from mindspeed_rlxf.weights.boxes import (
    BoxedTensor,
    BoxedWeights,
    ShardBox,
    StoredBox,
    shard_boxes,
    whole,
)
from mindspeed_rlxf.weights.torch_file import StoredTensor

MAX_PROBLEMS = 8  # of one folder: the first few tell which model it is
RM_HEAD_BIAS = "rm_head.bias"

IGNORED = re.compile(r"_extra_state|rotary_pos_emb\.inv_freq$|rotary_emb\.inv_freq$")
"""Names of what is stored beside the weights."""


Stored = TypeVar("Stored", StoredTensor, BoxedTensor)
"""A Megatron tensor in a file."""


class MegatronWeights(BoxedWeights):
    """The weights of a Megatron checkpoint."""

    def __init__(self, folder: Path, architecture: ArchitectureConfig) -> None:
        super().__init__()
        self.folder, self.architecture = folder, architecture
        self.dropped_bias: float | None = None  # of a reward head: Hugging Face has none

    def add_shard(
        self,
        parameter: StageParameter,
        found: tuple[str, StoredTensor | BoxedTensor] | None,
        tp_rank: int,
        tp: int,
        ep_rank: int = 0,
    ) -> list[str]:
        """Check a rank's shard of a parameter, and add its boxes unless another rank has the same.

        found: its name in the checkpoint, and the tensor
        Returns what is wrong with it.
        """
        if found is None:
            # A checkpoint has one of the heads or none; what needs a head reports its absence.
            is_head = parameter.name in (OUTPUT_LAYER.name, RM_HEAD.name)
            return [] if is_head else [f"{parameter.name} is missing"]
        a, (name, stored) = self.architecture, found
        rows = sum(stored.shape[:1]) if parameter.split is Split.VOCAB else None
        if rows is not None and rows * tp < a.vocab_size:
            return [f"{name} has {rows * tp} rows, the model needs {a.vocab_size}"]
        expected = shard_shape(parameter, a, tp, rows)
        if not stored.dtype.is_floating_point:
            return [f"{name} is {stored.dtype}, the model needs floating-point numbers"]
        if stored.shape != expected:
            return [f"{name} is {list(stored.shape)}, the model needs {list(expected)}"]
        if parameter.is_first_copy(tp_rank, ep_rank):
            for part in shard_boxes(parameter, a, tp_rank, tp, rows):
                self._add(part, stored)
        return []

    def _add(self, part: ShardBox, stored: StoredTensor | BoxedTensor) -> None:
        """Add one box of a rank's shard to the Hugging Face tensor that it belongs to."""
        if part.source not in self.tensors:
            name, shape = (
                f"{part.source} in {self.folder}",
                hf_shape(part.source, self.architecture),
            )
            self.tensors[part.source] = BoxedTensor(name, stored.dtype, shape, [])
        read = StoredBox(part.box, lambda box: stored.read(part.to_shard(box)))
        self.tensors[part.source].boxes.append(read)

    def note_bias(self, stored: StoredTensor | BoxedTensor | None) -> None:
        """Keep the bias of a reward head, for a message."""
        if stored is not None and stored.shape == (1,):
            self.dropped_bias = float(stored.read(whole((1,))))


def spellings(name: str) -> list[str]:
    """List the names under which checkpoints store a parameter.

    Layers may be local or fused, and our own checkpoints name the score head their own way.

    Megatron stores the norm before a linear layer under that layer's name where both are one
    module (Transformer Engine), and always so in sharded checkpoints.
    """
    fused = {
        "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
        "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    }
    if name == RM_HEAD.name:
        return [name, SCORE_HEAD.name]
    for ours, theirs in fused.items():
        if name.endswith(ours):
            return [name, name.removesuffix(ours) + theirs]
    return [name]


def find(parameter: StageParameter, tensors: Mapping[str, Stored]) -> tuple[str, Stored] | None:
    """The spelling under which a parameter is stored, and its tensor."""
    return next(((n, tensors[n]) for n in spellings(parameter.name) if n in tensors), None)


def unknown_names(names: Iterable[str], used: set[str]) -> list[str]:
    """Names of a checkpoint that stand for no parameter of the model."""
    known = used | {RM_HEAD_BIAS, OUTPUT_LAYER.name}
    return sorted(name for name in names if name not in known and not IGNORED.search(name))


def refuse(folder: Path, problems: list[str]) -> None:
    """Raise a ValueError that lists how the folder differs from the model, if it does."""
    if not problems:
        return
    more = len(problems) - MAX_PROBLEMS
    shown = problems[:MAX_PROBLEMS] + ([f"and {more} more"] if more > 0 else [])
    raise ValueError(
        f"{folder} holds another model than config.json describes: {'; '.join(shown)}; "
        "give the config.json of that model"
    )
