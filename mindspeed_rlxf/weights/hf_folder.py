"""Reading a Hugging Face folder slice by slice, and telling beforehand what is wrong with it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mindspeed_rlxf.files.plain import MAX_JSON, parse_json
from mindspeed_rlxf.files.safe import locate_inside, open_inside, read_inside
from mindspeed_rlxf.models.parameters import Slice
from mindspeed_rlxf.weights.formats import INDEX, SINGLE
from mindspeed_rlxf.weights.reader import WeightReader


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
        index = (slice(0, 0),)
        return self._slice(name)[index].dtype

    def read(self, part: Slice) -> Tensor:
        """Just the bytes of one slice."""
        view = self._slice(part.source)
        span = slice(part.start, part.stop)
        tensor = view[span] if part.dim == 0 else view[:, span]
        self.bytes_read += tensor.numel() * tensor.element_size()
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
            files = sorted(set(weight_map.values()))
            paths = {file: locate_inside(self.folder, file, INDEX) for file in files}
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
        text = read_inside(index.parent, index.name, MAX_JSON)
    except OSError as error:
        raise ValueError(f"{index} cannot be read ({error.strerror}); copy it again") from None
    try:
        found = parse_json(text)["weight_map"]
        return {str(name): str(file) for name, file in dict(found).items()}
    except (ValueError, KeyError, TypeError) as error:
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
