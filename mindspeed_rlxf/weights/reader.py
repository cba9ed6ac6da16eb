"""Readers of weights: boxes of tensors by Hugging Face names, whatever the folder holds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

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
    Box,
    BoxedTensor,
    BoxedWeights,
    ShardBox,
    StoredBox,
    shard_boxes,
    whole,
)

MAX_PROBLEMS = 8  # of one folder: the first few tell which model it is
RM_HEAD_BIAS = "rm_head.bias"

IGNORED = re.compile(r"_extra_state|rotary_pos_emb\.inv_freq$|rotary_emb\.inv_freq$")
"""Names of what is stored beside the weights."""


@dataclass(frozen=True)
class _StoredShard:
    """A rank's part of a parameter in a file. Fields as the arguments of `shard_boxes`."""

    parameter: StageParameter
    tp_rank: int
    tp: int
    vocab_rows: int | None
    stored: BoxedTensor

    def boxes(self, source: str, architecture: ArchitectureConfig) -> Iterator[StoredBox]:
        """Yield the boxes of a Hugging Face tensor that the shard contains, in that tensor.

        Each has a function that reads it; nothing is read here. Yields none if the shard has
        nothing of the tensor `source`.
        """
        places = shard_boxes(self.parameter, architecture, self.tp_rank, self.tp, self.vocab_rows)
        for place in places:
            if place.source == source:
                yield StoredBox(place.box, partial(self._read, place))

    def _read(self, place: ShardBox, box: Box) -> Tensor:
        return self.stored.read(place.to_shard(box))


class MegatronWeights(BoxedWeights):
    """The weights of a Megatron checkpoint, by Hugging Face names; fill it with `add_shard`."""

    def __init__(self, folder: Path, architecture: ArchitectureConfig) -> None:
        super().__init__()
        self.folder, self.architecture = folder, architecture
        self.dropped_bias: float | None = None  # of a reward head: Hugging Face has none
        self._shards: dict[str, list[_StoredShard]] = {}  # by Hugging Face name

    def __contains__(self, name: str) -> bool:
        return name in self._shards

    def names(self) -> list[str]:
        return list(self._shards)

    def tensor(self, name: str) -> BoxedTensor:
        if name not in self.tensors:
            shards, shape = self._shards[name], hf_shape(name, self.architecture)
            boxes = [box for shard in shards for box in shard.boxes(name, self.architecture)]
            where = f"{name} in {self.folder}"
            self.tensors[name] = BoxedTensor(where, shards[0].stored.dtype, shape, boxes)
        return self.tensors[name]

    def add_shard(
        self,
        parameter: StageParameter,
        found: tuple[str, BoxedTensor] | None,
        tp_rank: int,
        tp: int,
        ep_rank: int = 0,
    ) -> list[str]:
        """Check a rank's shard of a parameter; add it unless it is a copy of another rank's.

        found: its (name in the checkpoint, tensor), None = the rank has none
        Returns a list with the first problem, and then adds nothing, or []. Problems: missing
        (unless output layer or reward head), no floating-point numbers, another shape (more rows of
        the vocabulary are allowed).
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
            shard = _StoredShard(parameter, tp_rank, tp, rows, stored)
            for source in parameter.sources:
                self._shards.setdefault(source, []).append(shard)
        return []

    def note_bias(self, stored: BoxedTensor | None) -> None:
        """Read the bias of a reward head into `dropped_bias`, if it has the shape [1].

        Does nothing for None and for other shapes.
        """
        if stored is not None and stored.shape == (1,):
            self.dropped_bias = float(stored.read(whole((1,))))


def spellings(name: str) -> list[str]:
    """List the names under which checkpoints may store a parameter, its own first.

    A score head has another name in checkpoints of this package. The norm before a linear layer has
    that layer's name where they are one module (Transformer Engine), and in sharded checkpoints.
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


def find(
    parameter: StageParameter, tensors: Mapping[str, BoxedTensor]
) -> tuple[str, BoxedTensor] | None:
    """Return (name under which a parameter is stored, its tensor); None where it is not stored."""
    return next(((n, tensors[n]) for n in spellings(parameter.name) if n in tensors), None)


def unknown_names(names: Iterable[str], used: set[str]) -> list[str]:
    """Return the names that are neither in `used` nor expected beside the weights, sorted.

    Expected are the output layer, the bias of a reward head, and IGNORED names.
    """
    known = used | {RM_HEAD_BIAS, OUTPUT_LAYER.name}
    return sorted(name for name in names if name not in known and not IGNORED.search(name))


def refuse(folder: Path, problems: list[str]) -> None:
    """Raise a ValueError with the problems of a folder of weights, if there are any.

    It says that the model is not that of config.json, and lists the first MAX_PROBLEMS.
    """
    if not problems:
        return
    more = len(problems) - MAX_PROBLEMS
    shown = problems[:MAX_PROBLEMS] + ([f"and {more} more"] if more > 0 else [])
    text = "".join(c if c.isprintable() else "?" for c in "; ".join(shown))
    raise ValueError(
        f"{folder} holds another model than config.json describes: {text}; give the config.json of "
        "that model"
    )
