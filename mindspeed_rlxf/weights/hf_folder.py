"""Hugging Face folders: read box by box, checked without reading tensors, and their indexes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch

from mindspeed_rlxf.files.plain import MAX_JSON, parse_json
from mindspeed_rlxf.files.safe import locate_inside, read_inside, replace_file
from mindspeed_rlxf.weights.boxes import BoxedTensor, BoxedWeights, whole
from mindspeed_rlxf.weights.formats import INDEX, PICKLED, PICKLED_INDEX, SINGLE
from mindspeed_rlxf.weights.pickled import read_torch_file
from mindspeed_rlxf.weights.safetensors_file import HEADER_ERRORS, SafetensorsFile


class HfFolder(BoxedWeights):
    """The tensors of a folder. Its files are opened when they are needed, and stay open.

    Safetensors files come before `pytorch_model.bin`, which is pickled.
    Errors: ValueError when the folder, its index or one of its files is missing or damaged, or
    the index names a file elsewhere.
    """

    def __init__(self, folder: str | Path, trust_files: bool = False) -> None:
        super().__init__()
        self.folder, self._trust_files = Path(folder), trust_files
        self._opened: dict[Path, dict[str, BoxedTensor]] = {}
        self._files = self._file_of_each_tensor()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def names(self) -> list[str]:
        return list(self._files)

    def tensor(self, name: str) -> BoxedTensor:
        """Return a tensor by name; its data is not read yet.

        Raises ValueError if its file is damaged or lacks it, KeyError for a name not in the folder.
        """
        path = self._files[name]
        found = self._open(path).get(name)
        if found is None:
            raise ValueError(f"{path} lacks {name}, which the index has there; copy it again")
        return found

    def _open(self, path: Path) -> dict[str, BoxedTensor]:
        """Return the tensors of a file by name; opens it at the first call.

        Raises ValueError when it cannot be read or is damaged.
        """
        if path not in self._opened:
            if path.suffix != ".bin":
                self._opened[path] = dict(_read_header(path))
                return self._opened[path]
            content = read_torch_file(path, self._trust_files)
            if not isinstance(content, dict):
                raise ValueError(f"{path} holds no tensors by name; give the folder of a model")
            self._opened[path] = {
                name: BoxedTensor.of(name, tensor.detach())
                for name, tensor in content.items()
                if isinstance(tensor, torch.Tensor)
            }
        return self._opened[path]

    def _file_of_each_tensor(self) -> dict[str, Path]:
        """Map each tensor's name to its file, by the index, or else by the single file.

        Raises ValueError when the folder, a file or both index and single file are missing, or the
        index or the single file is damaged.
        """
        if not self.folder.is_dir():
            raise ValueError(f"{self.folder} is not a folder; give the folder of a model")
        for index, single in ((INDEX, SINGLE), (PICKLED_INDEX, PICKLED)):
            if (self.folder / index).exists():
                weight_map = _weight_map(self.folder, index)
                files = sorted(set(weight_map.values()))
                paths = {file: locate_inside(self.folder, file, index) for file in files}
                missing = [file for file, path in paths.items() if not path.exists()]
                if missing:
                    rule = f"{self.folder / index} names files that are missing"
                    raise ValueError(f"{rule}: {', '.join(missing)}")
                return {name: paths[file] for name, file in weight_map.items()}
            if (self.folder / single).exists():
                return dict.fromkeys(self._open(self.folder / single), self.folder / single)
        raise ValueError(
            f"{self.folder} holds neither {SINGLE} nor {INDEX}; give the folder of a model"
        )


def _read_header(path: Path) -> Iterator[tuple[str, BoxedTensor]]:
    """Yield each tensor of a safetensors file with its name; their data is read later."""
    file = SafetensorsFile(path)
    try:
        for name, dtype, shape, first in file.tensors():
            boxes = [file.stored_box(first, dtype, whole(shape))]
            yield name, BoxedTensor(name, dtype, shape, boxes)
    except HEADER_ERRORS as error:
        rule = f"{path} is damaged or truncated ({error})"
        raise ValueError(f"{rule}; copy it again") from None


def _weight_map(folder: Path, name: str) -> dict[str, str]:
    """Read an index: return tensor name -> file name, in its order.

    Raises ValueError where it is damaged or cannot be read. File names are not checked.
    """
    index = folder / name
    try:
        text = read_inside(folder, name, MAX_JSON)
    except OSError as error:
        raise ValueError(f"{index} cannot be read ({error.strerror}); copy it again") from None
    try:
        found = parse_json(text)["weight_map"]
        return {str(name): str(file) for name, file in dict(found).items()}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} has no readable weight_map ({error!r}); copy it again") from None


def shape_problems(folder: BoxedWeights, expected: dict[str, tuple[int, ...]]) -> list[str]:
    """Return a line for each expected tensor that is missing or has another shape; [] for none.

    Other tensors of the folder are no problem. Reads headers only. expected: name -> shape
    """
    problems = []
    for name, shape in expected.items():
        if name not in folder:
            problems.append(f"{name} is missing")
        elif folder.shape(name) != shape:
            problems.append(f"{name} is {list(folder.shape(name))}, the model needs {list(shape)}")
    return problems


def hf_file_name(number: int, count: int) -> str:
    """Return the name of a file of weights. number: from 0; count: number of files"""
    return SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def write_index(folder: Path, files: dict[str, dict[str, int]]) -> None:
    """Write the index of several files: weight map and sum of bytes; does nothing for one or none.

    files: file name -> {tensor name: bytes}
    """
    if len(files) > 1:
        weight_map = {name: file for file, sizes in files.items() for name in sizes}
        total = sum(sum(sizes.values()) for sizes in files.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        replace_file(folder / INDEX, json.dumps(index, indent=2))
