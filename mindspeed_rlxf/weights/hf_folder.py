"""Hugging Face folders: reads chunks, and writes safetensors files tensor by tensor.

To write a file, the safetensors library wants all its tensors in memory.
"""

import json
import os
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mindspeed_rlxf.weights.atomic import replace_file
from mindspeed_rlxf.weights.chunks import PlannedTensor, StoredTensor, StoredWeights, Wrote
from mindspeed_rlxf.weights.formats import INDEX, PICKLED, PICKLED_INDEX, SINGLE
from mindspeed_rlxf.weights.pickled import read_torch_file

FILE_BYTES = 4 * 1024**3  # of a file that `write_stream` writes

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
OF_NAME = {name: dtype for dtype, name in DTYPES.items()}


def open_hf_folder(folder: str | Path, trust_files: bool = False) -> StoredWeights:
    """Open a folder's tensors; safetensors files take precedence over `pytorch_model.bin`.

    Reads only headers.

    Raises:
        ValueError: folder, index or a file is missing or damaged.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give the folder of a model")
    for index, single in ((INDEX, SINGLE), (PICKLED_INDEX, PICKLED)):
        if (folder / index).exists():
            return _open_all(folder / index, trust_files)
        if (folder / single).exists():
            return _open_file(folder / single, trust_files)
    raise ValueError(f"{folder} holds neither {SINGLE} nor {INDEX}; give the folder of a model")


def _open_all(index: Path, trust_files: bool) -> StoredWeights:
    try:
        weight_map = dict(json.loads(index.read_bytes())["weight_map"])
        file_of_tensor = {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError) as error:
        rule = f"{index} has no readable weight_map ({error!r})"
        raise ValueError(f"{rule}; copy it again") from None
    files = sorted(set(file_of_tensor.values()))
    missing_files = [file for file in files if not (index.parent / file).exists()]
    if missing_files:
        raise ValueError(f"{index} names files that are missing: {', '.join(missing_files)}")
    tensors_of_file = {file: _open_file(index.parent / file, trust_files) for file in files}
    weights: StoredWeights = {}
    for name, file in file_of_tensor.items():
        if name not in tensors_of_file[file]:
            rule = f"{index.parent / file} lacks {name}, which the index has there"
            raise ValueError(f"{rule}; copy it again")
        weights[name] = tensors_of_file[file][name]
    return weights


def _open_file(path: Path, trust_files: bool) -> StoredWeights:
    if path.suffix == ".bin":
        content = read_torch_file(path, trust_files)
        if not isinstance(content, dict):
            raise ValueError(f"{path} holds no tensors by name; give the folder of a model")
        tensors = {name: t.detach() for name, t in content.items() if isinstance(t, torch.Tensor)}
        return {n: StoredTensor.of(n, t, t.dtype, tuple(t.shape)) for n, t in tensors.items()}
    return open_safetensors(path)


def open_safetensors(path: Path) -> StoredWeights:
    """Map a safetensors file. Raises ValueError if it is missing or damaged."""
    try:
        file = safe_open(path, framework="pt")
        weights: StoredWeights = {}
        for name in file.keys():  # noqa: SIM118, no dict
            lazy = file.get_slice(name)
            dtype = OF_NAME[lazy.get_dtype()]
            weights[name] = StoredTensor.of(name, lazy, dtype, tuple(lazy.get_shape()))
    except (OSError, SafetensorError, KeyError) as error:
        raise ValueError(f"{path} is damaged or truncated ({error!r}); copy it again") from None
    return weights


def shape_problems(weights: StoredWeights, expected: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return a line per missing or misshapen tensor."""
    problems = []
    for name, shape in expected.items():
        if name not in weights:
            problems.append(f"{name} is missing")
        elif weights[name].shape != shape:
            problems.append(f"{name} is {list(weights[name].shape)}, the model needs {list(shape)}")
    return problems


def hf_file_name(number: int, count: int) -> str:
    """Return the name for file `number`, counted from 0, out of `count`."""
    return SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def write_index(folder: Path, files: dict[str, dict[str, int]]) -> None:
    """Write the index if there are several files, given as {file: {tensor: bytes}}."""
    if len(files) > 1:
        weight_map = {name: file for file, sizes in files.items() for name in sizes}
        total = sum(sum(sizes.values()) for sizes in files.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        replace_file(folder / INDEX, json.dumps(index, indent=2))


def write_safetensors(
    path: Path, tensors: dict[str, PlannedTensor], wrote: Wrote = lambda _: None
) -> None:
    """Write a safetensors file tensor by tensor, and fsync it; an older file is replaced.

    The widest dtypes come first, which aligns all tensors.
    """
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, planned in tensors.items():
        header[name] = {
            "dtype": DTYPES[planned.dtype],
            "shape": list(planned.shape),
            "data_offsets": [offset, offset + planned.num_bytes],
        }
        offset += planned.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data is aligned
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for planned in tensors.values():
            flat = planned.make().contiguous().view(-1)
            file.write(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
            wrote(planned.num_bytes)
        file.flush()
        os.fsync(file.fileno())


def write_stream(
    tensors: Iterator[tuple[str, Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
    itemsize: int,
    folder: Path,
    writes: bool,
) -> OSError | None:
    """Write a stream of tensors to a folder, at most FILE_BYTES in a file; return an error, if any.

    Iterates to the end even after an error, and on ranks that do not write, as making the tensors
    may be a collective. `shapes` has the stream's names in its order, `itemsize` counts bytes per
    element.
    """
    groups: list[list[str]] = []
    size = FILE_BYTES
    for name, shape in shapes.items():
        if size + prod(shape) * itemsize > FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += prod(shape) * itemsize
    failed: OSError | None = None
    written: dict[str, dict[str, int]] = {}
    for number, names in enumerate(groups):
        planned: dict[str, PlannedTensor] = {}
        for name in names:
            stream_name, tensor = next(tensors)
            assert stream_name == name, "the stream has the order of the shapes"
            if writes and failed is None:
                # A copy on CPU too: offloading cannot free a storage that numpy has read.
                planned[name] = PlannedTensor.of(tensor.to("cpu", copy=True))
        file = hf_file_name(number, len(groups))
        written[file] = {name: tensor.num_bytes for name, tensor in planned.items()}
        try:
            if planned:
                folder.mkdir(parents=True, exist_ok=True)
                write_safetensors(folder / file, planned)
        except OSError as error:
            failed = error
    assert next(tensors, None) is None, "the stream has the shapes' tensors"
    if writes and failed is None:
        write_index(folder, written)
    return failed
