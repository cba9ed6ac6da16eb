"""References to rows, which stay on the workers that made them.

The driver only holds and rearranges references. No tensor passes through it, not even in reports.
"""

from __future__ import annotations

import dataclasses
import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

from mindspeed_rlxf.data.batch import Rows

Handle = Any  # hashable; what a runtime needs to find the rows again
Fetch = Callable[[list[Handle]], list[Rows]]


class RankRows(NamedTuple):
    """Rows returned by one rank."""

    handle: Handle
    num_rows: int


@dataclass(frozen=True)
class RowsRef:
    """A reference to the rows in several pieces: all rows, or a selection in any order."""

    pieces: tuple[RankRows, ...]
    selection: tuple[int, ...] | None = None  # indices into all pieces' rows; None = all rows

    @cached_property
    def num_rows(self) -> int:
        """Row count."""
        if self.selection is not None:
            return len(self.selection)
        return sum(piece.num_rows for piece in self.pieces)

    @cached_property
    def _starts(self) -> list[int]:
        return _first_rows(self.pieces)

    def take(self, rows: Sequence[int]) -> RowsRef:
        """Return a reference to these rows, in the given order, with only the pieces it needs.

        Needs at least one index; repeats are allowed. Raises IndexError if one is negative or too
        large.
        """
        assert len(rows) > 0, "take needs at least one row"
        if min(rows) < 0 or max(rows) >= self.num_rows:
            rule = f"rows must be in 0..{self.num_rows - 1}"
            raise IndexError(f"{rule}, got {min(rows)}..{max(rows)}")
        if self.selection is not None:
            rows = [self.selection[row] for row in rows]
        starts = self._starts
        piece_of_row = [bisect_right(starts, row) - 1 for row in rows]
        used = sorted(set(piece_of_row))
        pieces = [self.pieces[i] for i in used]
        new_starts = dict(zip(used, _first_rows(pieces), strict=True))
        selection = [
            row - starts[i] + new_starts[i] for row, i in zip(rows, piece_of_row, strict=True)
        ]
        is_all = selection == list(range(sum(piece.num_rows for piece in pieces)))
        return RowsRef(tuple(pieces), None if is_all else tuple(selection))

    def reordered(self, rows: Sequence[int]) -> RowsRef:
        """Return a reference as `take` does, but with all pieces if `rows` are all rows.

        So pieces still tell the replicas that hold them, those with 0 rows included.
        """
        if self.selection is not None or sorted(rows) != list(range(self.num_rows)):
            return self.take(rows)
        return RowsRef(self.pieces, None if list(rows) == sorted(rows) else tuple(rows))

    def __reduce__(self) -> tuple[type[RowsRef], tuple[Any, ...]]:
        return RowsRef, (self.pieces, self.selection)

    @classmethod
    def concat(cls, refs: Sequence[RowsRef]) -> RowsRef:
        """Return a reference to all rows in `refs`, in turn; a single ref is returned as it is."""
        if len(refs) == 1:
            return refs[0]
        pieces: list[RankRows] = []
        selection: list[int] = []
        offset = 0
        for ref in refs:
            num_rows = sum(piece.num_rows for piece in ref.pieces)
            rows = range(num_rows) if ref.selection is None else ref.selection
            pieces += ref.pieces
            selection += [offset + row for row in rows]
            offset += num_rows
        return cls(tuple(pieces), tuple(selection))

    def split(self, n: int) -> list[RowsRef]:
        """Return references to `n` contiguous shards of equal size, or raise ValueError."""
        if self.num_rows % n:
            raise ValueError(f"{self.num_rows} rows must be a multiple of {n} to be split equally")
        if n == 1:
            return [self]
        size = self.num_rows // n
        if self.selection is None and all(piece.num_rows == size for piece in self.pieces):
            return [RowsRef((piece,)) for piece in self.pieces]  # as its replicas returned them
        return [self.take(range(i * size, (i + 1) * size)) for i in range(n)]

    def by_piece(self) -> list[tuple[RankRows, list[int], list[int]]]:
        """Return (piece, rows, positions) for each piece with a selected row, in piece order.

        Rows are indices within the piece; positions are those rows' ascending places in this
        reference. Without rows, returns the first piece, for its row type.
        """
        selection: Sequence[int] | None = self.selection
        if selection is None:
            selection = range(self.num_rows)
        starts = self._starts
        entries: list[tuple[RankRows, list[int], list[int]]] = [(p, [], []) for p in self.pieces]
        for position, row in enumerate(selection):
            number = bisect_right(starts, row) - 1
            _, rows, positions = entries[number]
            rows.append(row - starts[number])
            positions.append(position)
        return [entry for entry in entries if entry[1]] or entries[:1]


def as_rows_field(ref: RowsRef | None) -> Any:
    """Return `ref` untyped, for a dataclass field with rows: workers get the rows in its place."""
    return ref


def resolve(ref: RowsRef, fetch: Fetch) -> Rows:
    """Fetch the pieces `ref` needs; return its rows, in its order."""
    entries = ref.by_piece()
    fetched = fetch([piece.handle for piece, _, _ in entries])
    chosen: list[Rows] = []
    positions: list[int] = []
    for (piece, rows, piece_positions), piece_rows in zip(entries, fetched, strict=True):
        assert piece_rows is not None, f"the method behind {piece.handle} returned no rows"
        assert piece_rows.num_rows == piece.num_rows, (
            f"{piece.handle} holds {piece_rows.num_rows} rows, not {piece.num_rows}"
        )
        is_all = rows == list(range(piece_rows.num_rows))
        chosen.append(piece_rows if is_all else piece_rows.select(rows))
        positions += piece_positions
    joined = type(chosen[0]).concat(chosen)
    if positions == sorted(positions):
        return joined
    return joined.select(sorted(range(len(positions)), key=positions.__getitem__))


def find_refs(value: Any) -> list[RowsRef]:
    """Return an argument's references: itself, or those in its dataclass fields."""
    return [value] if isinstance(value, RowsRef) else list(_ref_fields(value).values())


def resolve_refs(args: Sequence[Any], fetch: Fetch) -> list[Any]:
    """Return `args` with every RowsRef replaced by its rows; calls `fetch` at most once."""
    refs = [ref for arg in args for ref in find_refs(arg)]
    if not refs:
        return list(args)
    handles: dict[Handle, None] = {}  # a set in order
    for ref in refs:
        handles |= {piece.handle: None for piece, _, _ in ref.by_piece()}
    rows_of = dict(zip(handles, fetch(list(handles)), strict=True))

    def read(ref: RowsRef) -> Rows:
        return resolve(ref, lambda handles: [rows_of[handle] for handle in handles])

    return [_replace_refs(arg, read) for arg in args]


def number_handles(args: Sequence[Any]) -> tuple[tuple[Any, ...], list[Handle]]:
    """Return `args` with the handles in its RowsRefs replaced by indices, and the handle list."""
    index: dict[Handle, int] = {}

    def number(ref: RowsRef) -> RowsRef:
        pieces = [RankRows(index.setdefault(handle, len(index)), n) for handle, n in ref.pieces]
        return RowsRef(tuple(pieces), ref.selection)

    return tuple(_replace_refs(arg, number) for arg in args), list(index)


def split_refs(value: Any, n: int) -> list[Any]:
    """Return an argument for each of `n` replicas.

    Splits a RowsRef, alone or in a dataclass field, into equal contiguous shards (ValueError if `n`
    does not divide its rows). Other values are the same for all.
    """
    if isinstance(value, RowsRef):
        return value.split(n)
    split_fields = {name: ref.split(n) for name, ref in _ref_fields(value).items()}
    if not split_fields:
        return [value] * n  # the same object: Ray sends it once
    values = []
    for replica in range(n):
        fields = {name: refs[replica] for name, refs in split_fields.items()}
        values.append(dataclasses.replace(value, **fields))
    return values


def _replace_refs(value: Any, replace: Callable[[RowsRef], Any]) -> Any:
    if isinstance(value, RowsRef):
        return replace(value)
    fields = {name: replace(ref) for name, ref in _ref_fields(value).items()}
    return dataclasses.replace(value, **fields) if fields else value


def _ref_fields(value: Any) -> dict[str, RowsRef]:
    if isinstance(value, (Rows, type)) or not dataclasses.is_dataclass(value):
        return {}
    refs = {}
    for name in _field_names(value.__class__):
        field = getattr(value, name)
        if isinstance(field, RowsRef):
            refs[name] = field
    return refs


@cache
def _field_names(kind: Any) -> tuple[str, ...]:  # of a dataclass
    return tuple(field.name for field in dataclasses.fields(kind))


def _first_rows(pieces: Sequence[RankRows]) -> list[int]:
    return list(itertools.accumulate([0, *(piece.num_rows for piece in pieces[:-1])]))
