"""Tensors of a role in a checkpoint of a run: boxes in safetensors files, one file per rank.

    state_00003.safetensors     "exp_avg/model.layers.0.mlp.up_proj.weight@128,0": [64, 4096] fp32

A box is a part of a Hugging Face tensor, or of one of the optimizer's tensors for it (its slot).
Its name has slot, tensor and first element, the header has dtype, shape and bytes. `index.json` has
the headers of all files, so a rank of any layout opens only the files with byte ranges that it
needs. The padding of a vocabulary has no Hugging Face name and is not stored: it is zero.

Older versions of this package had megatron-core write sharded checkpoints, which are read here too.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.models.parameters import Head, hf_shapes
from mindspeed_rlxf.weights.boxes import (
    Box,
    BoxedTensor,
    BoxedWeights,
    HeldBox,
    MegatronWeights,
    PlannedTensor,
    refuse,
)
from mindspeed_rlxf.weights.formats import METADATA, STATE_FILES
from mindspeed_rlxf.weights.hf_folder import (
    DTYPES,
    OF_NAME,
    SafetensorsFile,
    shape_problems,
    sort_by_width,
    write_safetensors,
)
from mindspeed_rlxf.weights.state_files import read_index
from mindspeed_rlxf.weights.torch_dist import Metadata, read_torch_dist

Row = Sequence[Any]  # of the index: name, dtype, shape and first byte of a tensor in its file
WEIGHT = "weight"
BUFFER_BYTES = 4 << 20  # of one box; a box of several stored ones is held twice while it is read


def file_of(folder: Path, rank: int) -> Path:
    return folder / f"state_{rank:05d}.safetensors"


def write_boxes(file: Path, boxes: Iterable[HeldBox]) -> list[Row]:
    """Write a rank's boxes to a safetensors file and fsync it; an older file is replaced.

    Returns the rows for the index: (name, dtype, shape, first byte) of each tensor.
    """
    planned: dict[str, PlannedTensor] = {}
    for held in boxes:
        key = f"{held.slot}/{held.name}@{','.join(map(str, held.box.starts))}"
        assert key not in planned, f"{key} is written twice"
        planned[key] = PlannedTensor.of(held.tensor)
    write_safetensors(file, sort_by_width(planned))
    written = SafetensorsFile(file)
    rows: list[Row] = [(key, DTYPES[kind], *rest) for key, kind, *rest in written.tensors()]
    written.close()
    return rows


class RunState:
    """The tensors in a role's folder, from which boxes are read.

    Reads the index, or in a folder of an older version the headers of all files. The first read of
    a box opens its file, until `close`. Raises ValueError where a file is damaged, OSError where it
    cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._slots: dict[str, BoxedWeights] = {}
        index = read_index(folder)
        rows: dict[str, list[Row] | None] = (
            dict.fromkeys(sorted(path.name for path in folder.glob(STATE_FILES)))
            if index is None
            else index["tensors"]
        )
        self._files = [SafetensorsFile(folder / name) for name in rows]
        for file in self._files:
            try:
                self._add_boxes(file, rows[file.path.name])
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                rule = f"{file.path} is damaged or truncated ({error})"
                raise ValueError(f"{rule}; copy it again") from None
            finally:
                file.close()

    def _add_boxes(self, file: SafetensorsFile, rows: list[Row] | None) -> None:
        """Add the boxes of a rank's file, from the index or else its header, to their tensors.

        A tensor's size is the largest end of its boxes.
        """
        found = file.tensors()
        if rows is not None:
            found = ((key, OF_NAME[name], tuple(shape), at) for key, name, shape, at in rows)
        for key, dtype, shape, first_byte in found:
            slot, _, place = key.partition("/")
            name, _, corner = place.rpartition("@")
            box = Box(tuple(map(int, corner.split(","))), shape)
            tensors = self.slot(slot)
            known = tensors.get(name) or BoxedTensor(f"{slot} of {name}", dtype, shape, [])
            known.boxes.append(file.stored_box(first_byte, dtype, box))
            tensors[name] = replace(known, size=tuple(map(max, known.size, box.stops)))

    def slot(self, name: str) -> BoxedWeights:
        return self._slots.setdefault(name, BoxedWeights())

    def close(self) -> None:
        for file in self._files:
            file.close()


class ShardedRunState:
    """The tensors in a sharded checkpoint that megatron-core wrote; no pickle is run."""

    def __init__(
        self, folder: Path, architecture: ArchitectureConfig, trust_files: bool = False
    ) -> None:
        """Read the metadata. Raises ValueError for damage or objects other than data."""
        self.folder, self._architecture = folder, architecture
        self._metadata = Metadata(folder, trust_files)
        self._slots: dict[str, MegatronWeights] = {}

    def slot(self, name: str) -> MegatronWeights:
        """Return the tensors of one slot: "weight", or one of the optimizer's states.

        Raises ValueError when the folder has no such slot, or has another model.
        """
        if name not in self._slots:
            prefix = "" if name == WEIGHT else f"optimizer.state.{name}."
            self._slots[name] = read_torch_dist(self._metadata, self._architecture, prefix)
        return self._slots[name]

    def close(self) -> None:
        self._slots.clear()


StateReader = RunState | ShardedRunState
"""What a role saved: `slot` returns the tensors of that name. Where it saved none, RunState returns
none, ShardedRunState raises ValueError."""


def open_state(
    folder: Path, architecture: ArchitectureConfig, head: Head, trust_files: bool = False
) -> StateReader:
    """Open a role's folder of a checkpoint: torch_dist if it has METADATA, else safetensors files.

    The caller closes the reader. Raises ValueError for damage and another model (of torch_dist: in
    `slot`), OSError when a file cannot be read.
    """
    if (folder / METADATA).exists():
        return ShardedRunState(folder, architecture, trust_files)
    state, expected = RunState(folder), hf_shapes(architecture, head)
    weights = state.slot(WEIGHT)
    extra = [f"{name} is not in the model" for name in weights if name not in expected]
    refuse(folder, shape_problems(weights, expected) + extra)
    return state
