"""A role's tensors in a run checkpoint: chunks in safetensors files, one file per rank.

    state_00003.safetensors     "exp_avg/model.layers.0.mlp.up_proj.weight@128,0": [64, 4096] fp32

Each chunk belongs to a Hugging Face tensor, or to an optimizer state for it. Its name has
the state, tensor and first element, the header has dtype and shape. `index.json` repeats these for
all files, so a rank in any layout opens only the files it needs. Vocabulary padding has no Hugging
Face name and is not stored: it is zero.

In older versions megatron-core wrote sharded checkpoints, also read here.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch import Tensor

from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.weights.chunks import (
    Chunk,
    HeldChunk,
    PlannedTensor,
    StoredTensor,
    StoredWeights,
    refuse,
    whole,
)
from mindspeed_rlxf.weights.formats import METADATA, STATE_FILES
from mindspeed_rlxf.weights.hf_folder import (
    DTYPES,
    OF_NAME,
    open_safetensors,
    shape_problems,
    write_safetensors,
)
from mindspeed_rlxf.weights.state_files import read_index
from mindspeed_rlxf.weights.torch_dist import read_metadata_tensors, read_torch_dist

Row = Sequence[Any]  # of the index: name, dtype and shape of a tensor in its file
StateReader = Callable[[str], StoredWeights]
"""State name (WEIGHT or an optimizer state) -> its tensors, of a role."""
WEIGHT = "weight"
BUFFER_BYTES = 4 << 20  # of one chunk; one of several stored ones is held twice while it is read


def file_of(folder: Path, rank: int) -> Path:
    """Return the path to a rank's file."""
    return folder / f"state_{rank:05d}.safetensors"


def write_chunks(file: Path, chunks: Iterable[HeldChunk]) -> list[Row]:
    """Write a rank's chunks to a safetensors file and fsync it; an older file is replaced.

    Returns:
        Index rows (name, dtype, shape).
    """
    planned = {}
    for tensor_chunk in chunks:
        corner = ",".join(map(str, tensor_chunk.chunk.starts))
        key = f"{tensor_chunk.state_name}/{tensor_chunk.name}@{corner}"
        planned[key] = PlannedTensor.of(tensor_chunk.tensor)
    write_safetensors(file, planned)
    return [(key, DTYPES[tensor.dtype], tensor.shape) for key, tensor in planned.items()]


def read_states(folder: Path) -> dict[str, StoredWeights]:
    """Return the tensors by state name in a role's folder; a missing state is empty.

    Reads the index, or all headers in folders from older versions. Reading a chunk maps its file.

    Raises:
        ValueError: a damaged file.
    """
    open_once = cache(lambda file: open_safetensors(folder / file))  # maps it

    def read(file: str, key: str, chunk: Chunk) -> Tensor:
        return open_once(file)[key].read(chunk)

    index = read_index(folder)
    rows: list[tuple[str, Row]] = []  # with the file of each
    if index:
        for file, file_rows in index["tensors"].items():
            rows += [(file, row) for row in file_rows]
    else:
        for path in sorted(folder.glob(STATE_FILES)):
            for key, tensor in open_once(path.name).items():
                rows.append((path.name, (key, DTYPES[tensor.dtype], tensor.shape)))
    states: dict[str, StoredWeights] = defaultdict(dict)
    for file, (key, dtype_name, shape, *_) in rows:  # older versions have the first byte too
        state_name, _, chunk_name = key.partition("/")
        name, _, corner = chunk_name.rpartition("@")
        try:
            chunk = Chunk(tuple(map(int, corner.split(","))), tuple(shape))
        except ValueError:
            rule = f"{folder / file} is damaged or truncated ({key[:100]!r})"
            raise ValueError(f"{rule}; copy it again") from None
        stored = states[state_name].get(name)
        if stored is None:
            stored = StoredTensor(f"{state_name} of {name}", OF_NAME[dtype_name], (), [])
        stored.chunks.append((chunk, whole(chunk.shape), partial(read, file, key)))
        size = tuple(map(max, stored.size or chunk.stops, chunk.stops))  # the largest end
        states[state_name][name] = replace(stored, size=size)
    return states


def open_state(
    folder: Path,
    architecture: ArchitectureConfig,
    expected: Mapping[str, tuple[int, ...]],
    trust_files: bool = False,
) -> StateReader:
    """Open a role's checkpoint folder: torch_dist if it has METADATA, else safetensors files.

    Args:
        folder: The role's folder.
        architecture: Its model.
        expected: Shapes of all saved tensors by Hugging Face name.
        trust_files: See `read_metadata_tensors`.

    Returns:
        A function from state name to tensors. With torch_dist it raises ValueError for another
        model, and for a state that was not saved.

    Raises:
        ValueError: damage, or another model.
        OSError: an unreadable file.
    """
    if (folder / METADATA).exists():  # written by megatron-core; no pickle is run
        tensors = read_metadata_tensors(folder, trust_files)

        @cache
        def read_state(state_name: str) -> StoredWeights:
            prefix = "" if state_name == WEIGHT else f"optimizer.state.{state_name}."
            return read_torch_dist(folder, tensors, architecture, prefix)

        return read_state
    states = read_states(folder)
    extra = [f"{name} is not in the model" for name in states[WEIGHT] if name not in expected]
    refuse(folder, shape_problems(states[WEIGHT], dict(expected)) + extra)
    return states.__getitem__
