"""The store in which a worker keeps the rows that others may request."""

from __future__ import annotations

import threading
import time

import torch

from mindspeed_rlxf.cluster.kept_rows import KeptRows, copy_rows, count_bytes
from tests.distributed.cluster.stand_ins import Numbers


def test_kept_rows_do_not_follow_changes_of_the_role() -> None:
    kept, rows = KeptRows(), Numbers(torch.arange(3))
    kept.put(1, rows)
    rows.numbers.zero_()
    assert kept.wait_for([1], 0.0)[1].numbers.tolist() == [0, 1, 2]


def test_a_copy_of_rows_shares_neither_tensors_nor_lists() -> None:
    rows = Numbers(torch.arange(2))
    copied = copy_rows(rows)
    assert isinstance(copied, Numbers)
    copied.numbers.zero_()
    assert rows.numbers.tolist() == [0, 1]
    assert count_bytes(rows) == 16  # two int64


def test_a_reader_wakes_when_all_its_keys_are_there() -> None:
    kept, started = KeptRows(), time.monotonic()
    kept.put(1, None)
    makers = [threading.Timer(0.05 * (1 + i), kept.put, (2 + i, None)) for i in range(2)]
    for maker in makers:
        maker.start()
    assert kept.wait_for([1, 2, 3], 20.0) == {1: None, 2: None, 3: None}
    assert 0.1 <= time.monotonic() - started < 10


def test_a_reader_gets_what_exists_when_its_time_is_over() -> None:
    kept = KeptRows()
    kept.put(1, None)
    assert kept.wait_for([1, 2], 0.01) == {1: None}


def test_dropped_rows_cannot_be_replaced() -> None:
    kept = KeptRows()
    for key in (1, 2):
        kept.put(key, None)
    kept.drop([1, 7])
    kept.replace(1, "shared")
    kept.replace(2, "shared")
    assert kept.wait_for([1, 2], 0.0) == {2: "shared"}
    kept.clear()
    assert len(kept) == 0
