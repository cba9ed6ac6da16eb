"""References to rows: taking, splitting and joining them without moving rows."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from mindspeed_rlxf.cluster.refs import (
    RankRows,
    RowsRef,
    number_handles,
    resolve,
    resolve_refs,
    split_refs,
)
from mindspeed_rlxf.data.batch import Rows
from tests.distributed.cluster.stand_ins import Numbers


@dataclass
class Store:
    """Holds pieces by handle and remembers which were asked for."""

    sizes: list[int]
    fetched: list[str] = field(default_factory=list)

    @property
    def ref(self) -> RowsRef:
        return RowsRef(tuple(RankRows(f"piece {i}", size) for i, size in enumerate(self.sizes)))

    def fetch(self, handles: list[str]) -> list[Rows]:
        """Row r of all pieces together holds the number r."""
        self.fetched += handles
        starts = [sum(self.sizes[:i]) for i in range(len(self.sizes))]
        indices = [int(handle.split()[1]) for handle in handles]
        return [Numbers(torch.arange(self.sizes[i]) + starts[i]) for i in indices]


def numbers(rows: Rows) -> list[int]:
    assert isinstance(rows, Numbers)
    return rows.numbers.tolist()


def test_refs_are_joined_row_after_row() -> None:
    store = Store([3, 2, 4])  # rows 0 1 2 | 3 4 | 5 6 7 8
    whole = store.ref
    first, second = RowsRef(whole.pieces[:1]), RowsRef(whole.pieces[1:]).take([5, 0, 2])
    joined = RowsRef.concat([first, second, first.take([1])])
    assert joined.num_rows == 7
    assert numbers(resolve(joined, store.fetch)) == [0, 1, 2, 8, 3, 5, 1]
    assert numbers(resolve(joined.take([6, 3, 0]), store.fetch)) == [1, 8, 0]
    assert RowsRef.concat([first]) is first


def test_only_pieces_with_a_wanted_row_travel_and_are_fetched() -> None:
    store = Store([2, 2, 2])  # rows 0 1 | 2 3 | 4 5
    ref = store.ref.take([5, 1])
    assert [piece.handle for piece in ref.pieces] == ["piece 0", "piece 2"]
    resolve(ref, store.fetch)
    assert store.fetched == ["piece 0", "piece 2"]


def test_unequal_parts_and_rows_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match="6 rows must be a multiple of 4"):
        Store([4, 2]).ref.split(4)
    for row in (-1, 5):
        with pytest.raises(IndexError, match=r"rows must be in 0\.\.4"):
            Store([3, 2]).ref.take([0, row])


def test_a_replica_without_samples_has_rows_of_the_same_type() -> None:
    store = Store([3, 0])
    assert numbers(resolve(RowsRef(store.ref.pieces[1:]), store.fetch)) == []


@given(st.data())
def test_take_split_resolve_agree_with_plain_lists(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    total = sum(sizes)
    rows = data.draw(st.lists(st.integers(0, total - 1), min_size=1, max_size=12))
    parts = data.draw(st.sampled_from([n for n in range(1, 13) if len(rows) % n == 0]))
    store = Store(sizes)
    split = store.ref.take(rows).split(parts)
    assert [n for ref in split for n in numbers(resolve(ref, store.fetch))] == rows


@dataclass(frozen=True)
class Inputs:
    first: RowsRef
    second: RowsRef | None
    scale: float


def test_references_are_found_and_resolved_in_dataclasses_with_one_fetch() -> None:
    store = Store([2, 2])  # rows 0 1 | 2 3
    ref = store.ref
    inputs, alone, text = resolve_refs(
        (Inputs(ref, ref.take([3]), 0.5), ref.take([0]), "text"), store.fetch
    )
    assert store.fetched == ["piece 0", "piece 1"]
    assert numbers(inputs.first) == [0, 1, 2, 3] and numbers(inputs.second) == [3]
    assert inputs.scale == 0.5 and numbers(alone) == [0] and text == "text"


def test_handles_are_replaced_by_their_places_in_a_list() -> None:
    ref = Store([3, 2]).ref  # rows 0 1 2 | 3 4
    value = (Inputs(ref.take([4]), ref.take([3, 0]), 0.5), "text")
    (inputs, text), handles = number_handles(value)
    assert handles == ["piece 1", "piece 0"] and (inputs.scale, text) == (0.5, "text")
    assert inputs.first == RowsRef((RankRows(0, 2),), (1,))
    assert inputs.second == RowsRef((RankRows(1, 3), RankRows(0, 2)), (3, 0))


def test_a_value_without_references_is_one_object_for_all_replicas() -> None:
    """Ray sends an object once to the workers that share it."""
    nobody: Any = None
    value = Inputs(nobody, None, 0.5)
    assert {id(part) for part in split_refs(value, 3)} == {id(value)}
    assert resolve_refs([value], lambda handles: []) == [value]


def test_reordered_rows_keep_the_pieces_of_all_replicas():
    """Scorers find by them what they have begun, also where one replica has no row."""
    rows = RowsRef((RankRows("a", 2), RankRows("b", 0), RankRows("c", 1)))
    ref = rows.reordered([2, 0, 1])
    assert ref.pieces == rows.pieces and ref.selection == (2, 0, 1)
    assert rows.reordered([0, 1, 2]) == rows
    assert rows.reordered([2]) == rows.take([2])
