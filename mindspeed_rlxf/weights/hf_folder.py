"""Hugging Face folders: read box by box, checked without reading tensors, and their indexes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mindspeed_rlxf.files.safe import open_inside, replace_file
from mindspeed_rlxf.weights.boxes import Box
from mindspeed_rlxf.weights.formats import INDEX, SINGLE
from mindspeed_rlxf.weights.inside import inside
from mindspeed_rlxf.weights.reader import WeightReader
from mindspeed_rlxf.weights.regular import MAX_JSON, parse_json


class HfFolder:
    """The tensors of a folder, opened lazily; counts the bytes that were read.

    Errors: ValueError when the folder, its index or one of its files is missing or damaged, or
    the index names a file elsewhere.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.bytes_read = 0
        self._streams: list[IO[bytes]] = []  # what the library has mapped is reached through them
        self._open: dict[Path, safe_open] = {}
        self._files = self._file_of_each_tensor()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def names(self) -> list[str]:
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        return self._slice(name)[(slice(0, 0),)].dtype

    def read(self, name: str, box: Box) -> Tensor:
        """Read just the bytes of a box."""
        tensor = self._slice(name)[box.slices]
        self.bytes_read += tensor.nbytes
        return tensor

    def _slice(self, name: str):  # type: ignore[no-untyped-def]
        path = self._files[name]
        try:
            return self._opened(path).get_slice(name)
        except SafetensorError as error:
            raise ValueError(
                f"{path} lacks {name}, which {INDEX} has there ({error}); copy it again"
            ) from None

    def _opened(self, path: Path) -> safe_open:
        """The library opens by name; the name of what is open already is of the checked file."""
        if path in self._open:
            return self._open[path]
        try:
            stream = open_inside(self.folder, path.relative_to(self.folder).as_posix())
            checked = f"/proc/self/fd/{stream.fileno()}"
            self._open[path] = safe_open(checked if os.path.exists(checked) else path, "pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is damaged or truncated ({error}); copy it again") from None
        self._streams.append(stream)
        return self._open[path]

    def _file_of_each_tensor(self) -> dict[str, Path]:
        if not self.folder.is_dir():
            raise ValueError(f"{self.folder} is not a folder; give the folder of a model")
        index = self.folder / INDEX
        if index.exists():
            weight_map = _weight_map(index)
            paths = {f: inside(self.folder, f, INDEX) for f in sorted(set(weight_map.values()))}
            missing = [file for file, path in paths.items() if not path.exists()]
            if missing:
                raise ValueError(f"{index} names files that are missing: {', '.join(missing)}")
            return {name: paths[file] for name, file in weight_map.items()}
        single = self.folder / SINGLE
        if not single.exists():
            raise ValueError(
                f"{self.folder} holds neither {SINGLE} nor {INDEX}; only safetensors are read, "
                "because pickled weights can run code: save the model with safe_serialization"
            )
        return dict.fromkeys(self._opened(single).keys(), single)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        with open_inside(index.parent, index.name) as stream:
            text = stream.read(MAX_JSON + 1)
    except OSError as error:
        raise ValueError(f"{index} cannot be read ({error.strerror}); copy it again") from None
    if len(text) > MAX_JSON:
        raise ValueError(f"{index} has more than {MAX_JSON} bytes; copy it again")
    try:
        found = parse_json(text, index)["weight_map"]
        return {str(name): str(file) for name, file in dict(found).items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} has no readable weight_map ({error!r}); copy it again") from None


def shape_problems(folder: WeightReader, expected: dict[str, tuple[int, ...]]) -> list[str]:
    """One line for each tensor that is missing or has another shape; reads headers only."""
    problems = []
    for name, shape in expected.items():
        if name not in folder:
            problems.append(f"{name} is missing")
        elif folder.shape(name) != shape:
            problems.append(f"{name} is {list(folder.shape(name))}, the model needs {list(shape)}")
    return problems


def hf_file_name(number: int, count: int) -> str:
    """The name of a file of weights, by its number from 0 and how many there are."""
    return SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def write_index(folder: Path, files: dict[str, dict[str, int]]) -> None:
    """Write the index of several files; one needs none. files: name -> bytes of its tensors"""
    if len(files) > 1:
        weight_map = {name: file for file, sizes in files.items() for name in sizes}
        total = sum(sum(sizes.values()) for sizes in files.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        replace_file(folder / INDEX, json.dumps(index, indent=2))
