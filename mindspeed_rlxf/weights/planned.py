"""Tensors and files that are planned first, and made when they are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from mindspeed_rlxf.models.parameters import StageParameter

COPY_BYTES = 1 << 24

Wrote = Callable[[int], None]
"""Called with the number of bytes of each tensor that is written."""


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor that is made when it is written, and dropped after that."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: Tensor) -> PlannedTensor:
        """Wrap a tensor that exists already."""
        return cls(tuple(tensor.shape), tensor.dtype, lambda: tensor)

    def parts(self) -> Iterator[memoryview]:
        """Make the tensor and yield its bytes in parts of at most COPY_BYTES.

        It must be on the CPU; a contiguous one is not copied. Raises AssertionError if its shape or
        dtype is not the planned one.
        """
        tensor = self.make()
        assert tensor.shape == self.shape and tensor.dtype == self.dtype, (
            f"planned {self.shape} {self.dtype}, got {tensor.shape} {tensor.dtype}"
        )
        data: Any = memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        for start in range(0, len(data), COPY_BYTES):
            yield data[start : start + COPY_BYTES]


@dataclass(frozen=True)
class PlannedFile:
    """A file of a converted folder.

    path:      relative to the folder
    num_bytes: bytes of its tensors
    write:     called as write(path, wrote=...); writes the file and returns a value for the journal
    """

    path: str
    num_bytes: int
    write: Callable[..., Any]


MakeShard = Callable[[StageParameter, int], PlannedTensor]
"""(parameter, tensor-parallel rank) -> that rank's part of it."""
