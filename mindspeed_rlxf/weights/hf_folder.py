"""Hugging Face folders and safetensors files, written tensor by tensor and read box by box.

The library for safetensors wants all tensors of a file at once. It maps the files that it reads,
which ends the process if a file is truncated meanwhile.
"""

import json
import os
from collections.abc import Iterator
from functools import cached_property, partial
from math import prod
from pathlib import Path, PurePosixPath
from typing import IO

import torch
from torch import Tensor

from mindspeed_rlxf.weights.atomic import replace_file
from mindspeed_rlxf.weights.boxes import (
    Box,
    BoxedTensor,
    BoxedWeights,
    PlannedTensor,
    Shape,
    StoredBox,
    Wrote,
    whole,
)
from mindspeed_rlxf.weights.formats import INDEX, PICKLED, PICKLED_INDEX, SINGLE
from mindspeed_rlxf.weights.pickled import read_torch_file

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
ALIGNMENT = 8  # of the data, bytes
MAX_HEADER_BYTES = 32 << 20  # 300,000 tensors
NOTES = "__metadata__"
HEADER_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError)


class HfFolder(BoxedWeights):
    """The tensors of a folder; safetensors files come before `pytorch_model.bin`.

    Reads the headers of all files; the first read of a tensor opens its file, which stays open.
    Raises ValueError if the folder, its index or a file is missing or damaged, or elsewhere.
    """

    def __init__(self, folder: str | Path, trust_files: bool = False) -> None:
        super().__init__()
        place = Path(folder)
        if not place.is_dir():
            raise ValueError(f"{place} is not a folder; give the folder of a model")
        for name, single in ((INDEX, SINGLE), (PICKLED_INDEX, PICKLED)):
            if (place / name).exists():
                self._open_all(place / name, trust_files)
                return
            if (place / single).exists():
                self.update(_open_file(place / single, trust_files))
                return
        raise ValueError(f"{place} holds neither {SINGLE} nor {INDEX}; give the folder of a model")

    def _open_all(self, index: Path, trust_files: bool) -> None:
        try:
            weight_map = dict(json.loads(index.read_bytes())["weight_map"])
            found = {str(name): str(file) for name, file in weight_map.items()}
        except (ValueError, KeyError, TypeError) as error:
            rule = f"{index} has no readable weight_map ({error!r})"
            raise ValueError(f"{rule}; copy it again") from None
        paths = {file: index.parent / file for file in sorted({*found.values()})}
        for file in paths:
            path = PurePosixPath(file)
            if not file or path.is_absolute() or ".." in path.parts or not file.isprintable():
                rule = f"{index} must name files of its own folder, not {file[:200]!r}"
                raise ValueError(f"{rule}; do not use this folder, or copy it again")
        if missing := [file for file, path in paths.items() if not path.exists()]:
            raise ValueError(f"{index} names files that are missing: {', '.join(missing)}")
        opened = {file: _open_file(path, trust_files) for file, path in paths.items()}
        for name, file in found.items():
            if name not in opened[file]:
                rule = f"{paths[file]} lacks {name}, which the index has there"
                raise ValueError(f"{rule}; copy it again")
            self[name] = opened[file][name]


def _open_file(path: Path, trust_files: bool) -> dict[str, BoxedTensor]:
    """Return the tensors of a file by name, without their data."""
    if path.suffix == ".bin":
        content = read_torch_file(path, trust_files)
        if not isinstance(content, dict):
            raise ValueError(f"{path} holds no tensors by name; give the folder of a model")
        tensors = {name: t.detach() for name, t in content.items() if isinstance(t, torch.Tensor)}
        return {name: BoxedTensor.of(name, tensor) for name, tensor in tensors.items()}
    file = SafetensorsFile(path)
    try:
        return {
            name: BoxedTensor(name, dtype, shape, [file.stored_box(first, dtype, whole(shape))])
            for name, dtype, shape, first in file.tensors()
        }
    except HEADER_ERRORS as error:
        raise ValueError(f"{path} is damaged or truncated ({error}); copy it again") from None
    finally:
        file.close()


def shape_problems(folder: BoxedWeights, expected: dict[str, tuple[int, ...]]) -> list[str]:
    """Return a line for each expected tensor that is missing or has another shape."""
    problems = []
    for name, shape in expected.items():
        if name not in folder:
            problems.append(f"{name} is missing")
        elif folder.shape(name) != shape:
            problems.append(f"{name} is {list(folder.shape(name))}, the model needs {list(shape)}")
    return problems


def hf_file_name(number: int, count: int) -> str:
    """Return the name of file `number`, counted from 0, of `count` files of weights."""
    return SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def write_index(folder: Path, files: dict[str, dict[str, int]]) -> None:
    """Write the index, if there are several files. files: file name -> {tensor name: bytes}"""
    if len(files) > 1:
        weight_map = {name: file for file, sizes in files.items() for name in sizes}
        total = sum(sum(sizes.values()) for sizes in files.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        replace_file(folder / INDEX, json.dumps(index, indent=2))


def write_safetensors(
    path: Path, tensors: dict[str, PlannedTensor], wrote: Wrote = lambda _: None
) -> None:
    """Write a safetensors file, one tensor at a time, and fsync it; an older file is replaced."""
    header: dict[str, object] = {NOTES: {"format": "pt"}}
    end = 0
    for name, planned in tensors.items():
        start, end = end, end + planned.num_bytes
        header[name] = {
            "dtype": DTYPES[planned.dtype],
            "shape": list(planned.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for planned in tensors.values():
            file.writelines(planned.parts())
            wrote(planned.num_bytes)
        file.flush()
        os.fsync(file.fileno())


def sort_by_width(tensors: dict[str, PlannedTensor]) -> dict[str, PlannedTensor]:
    """Sort tensors by bytes per element, widest dtype first, so that all are aligned."""
    return dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))


class SafetensorsFile:
    """A safetensors file, opened at the first read, from which boxes of tensors are read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def stream(self) -> IO[bytes]:
        return self.path.open("rb")

    def tensors(self) -> Iterator[tuple[str, torch.dtype, Shape, int]]:
        """Read the header; yield (name, dtype, shape, offset in the file) of each tensor.

        Raises HEADER_ERRORS if the header is damaged or does not fit the file.
        """
        self._read_into(0, memoryview(size := bytearray(8)))
        length = int.from_bytes(size, "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"its header has {length} bytes")
        self._read_into(8, memoryview(text := bytearray(length)))
        header = json.loads(text)
        header.pop(NOTES, None)
        data, end = 8 + length, os.fstat(self.stream.fileno()).st_size
        for name, about in header.items():
            shape, dtype = tuple(about["shape"]), OF_NAME[about["dtype"]]
            first, last = about["data_offsets"]
            if last - first != prod(shape) * dtype.itemsize or data + last > end:
                raise ValueError(f"{name[:100]!r} does not fit the file")
            yield name, dtype, shape, data + first

    def stored_box(self, first_byte: int, dtype: torch.dtype, box: Box) -> StoredBox:
        """Return a StoredBox that reads the tensor at `first_byte` as `box` of a larger tensor."""
        return StoredBox(box, partial(self._read_box, first_byte, dtype, box))

    def _read_box(self, first_byte: int, dtype: torch.dtype, stored: Box, wanted: Box) -> Tensor:
        """Return the box `wanted` of the box `stored` that begins at `first_byte` in the file.

        Both have one axis or two. Whole rows are read at once, others row by row.
        """
        result = torch.empty(wanted.shape, dtype=dtype)
        target = memoryview(result.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        whole_rows = wanted.shape[1:] == stored.shape[1:]
        done, row_size = 0, prod(stored.shape[1:])
        for rows in [wanted] if whole_rows else wanted.split(1):
            first, *rest = rows.relative_to(stored).starts
            number, end = first * row_size + sum(rest), done + rows.numel * dtype.itemsize
            self._read_into(first_byte + number * dtype.itemsize, target[done:end])
            done = end
        return result

    def _read_into(self, offset: int, target: memoryview) -> None:
        done = 0
        while done < len(target):
            count = os.preadv(self.stream.fileno(), [target[done:]], offset + done)
            if count == 0:
                raise ValueError(f"{self.path} is truncated; copy it again")
            done += count

    def close(self) -> None:
        """Close the file; a later read opens it again."""
        if stream := vars(self).pop("stream", None):
            stream.close()
