"""Rows that many readers request at the same time."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.distributed.cluster.stand_ins import Numbers


@pytest.fixture
def rows() -> Any:
    """The module. It imports Ray, which must not happen before an own cluster is started."""
    from mindspeed_rlxf.cluster.ray import rows

    return rows


def test_large_rows_move_to_shared_memory_once(rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[Any] = []

    def put(outcome: Any) -> str:
        time.sleep(0.01)  # the others come meanwhile
        moved.append(outcome)
        return "shared"

    monkeypatch.setattr(rows.ray, "put", put)
    worker, large = rows.WorkerRows(), Numbers(torch.zeros(rows.SHARED_BYTES))
    threading.Timer(0.05, worker.kept.put, (1, large)).start()
    with ThreadPoolExecutor(rows.READERS) as readers:
        answers = list(readers.map(lambda _: ask(worker, 1), range(rows.READERS)))
    assert answers == [{1: "shared"}] * rows.READERS
    assert len(moved) == 1


def ask(worker: Any, key: int) -> dict[int, Any]:
    """Ask as a reader does, until there is an answer."""
    deadline = time.monotonic() + 20
    while not (answer := worker.give([key])) and time.monotonic() < deadline:
        time.sleep(0.01)
    return answer


def test_readers_that_wait_leave_threads_for_rows_that_exist(
    rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "ASK_S", 30.0)
    worker = rows.WorkerRows()
    worker.kept.put(2, None)
    with ThreadPoolExecutor(rows.READERS) as readers:
        waiting = [readers.submit(worker.give, [1]) for _ in range(rows.READERS)]
        assert readers.submit(worker.give, [2]).result(timeout=20) == {2: None}
        assert sum(each.done() for each in waiting) == rows.READERS - rows.WAITING
        worker.kept.put(1, None)
