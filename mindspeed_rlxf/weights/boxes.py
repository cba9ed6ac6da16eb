"""Boxes of matrices: which numbers of a tensor a rank holds, writes and reads.

A vector counts as a matrix of one column, so that every parameter is a matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Box:
    """Rows [top, bottom) and columns [left, right) of a matrix."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def height(self) -> int:
        return self.bottom - self.top

    @property
    def width(self) -> int:
        return self.right - self.left

    @property
    def numel(self) -> int:
        return self.height * self.width

    def overlap(self, other: Box) -> Box | None:
        """The numbers that both have; None = there are none."""
        top, bottom = max(self.top, other.top), min(self.bottom, other.bottom)
        left, right = max(self.left, other.left), min(self.right, other.right)
        return Box(top, bottom, left, right) if top < bottom and left < right else None

    def moved(self, down: int, right: int) -> Box:
        return Box(self.top + down, self.bottom + down, self.left + right, self.right + right)

    def in_rows(self, numel: int) -> Iterator[Box]:
        """Boxes of whole rows, one below the other, of at most `numel` numbers or one row each."""
        step = max(1, numel // max(1, self.width))
        for top in range(self.top, self.bottom, step):
            yield Box(top, min(top + step, self.bottom), self.left, self.right)


def whole(shape: tuple[int, ...]) -> Box:
    """The box that is all of a tensor with one or two axes."""
    assert 1 <= len(shape) <= 2, f"a parameter has one axis or two, not {shape}"
    return Box(0, shape[0], 0, shape[1] if len(shape) == 2 else 1)


def flat_boxes(start: int, stop: int, width: int) -> Iterator[Box]:
    """The numbers [start, stop) of a row-major matrix as at most three boxes, in order: the end of
    a row, whole rows, the start of a row."""
    while start < stop:
        row, left = divmod(start, width)
        rows = (stop - start) // width if left == 0 else 0
        box = (
            Box(row, row + rows, 0, width)
            if rows
            else Box(row, row + 1, left, min(width, left + stop - start))
        )
        yield box
        start += box.numel


def view(flat: Tensor, start: int, box: Box, width: int) -> Tensor:
    """[height, width of the box] of a row-major matrix with `width` columns, not copied.

    flat: contiguous; the numbers of the matrix from number `start` on
    """
    offset = flat.storage_offset() + box.top * width + box.left - start
    return flat.as_strided((box.height, box.width), (width, 1), offset)
