from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_rlxf.cluster.errors import Origin
from mindspeed_rlxf.cluster.protocol import BUILD, Reply, Request
from mindspeed_rlxf.cluster.refs import Piece, RowsRef
from mindspeed_rlxf.config.enums import Role


@pytest.fixture
def message() -> Any:
    """The module, which imports Ray."""
    from mindspeed_rlxf.cluster.ray import message

    return message


class Pool:
    """Two ranks, and what their rows were dropped by."""

    def __init__(self) -> None:
        self.workers = SimpleNamespace(places=[SimpleNamespace(process=n) for n in ("a", "b")])
        self.dropped: list[tuple[int, list[int]]] = []

    def drop_rows(self, key: int, ranks: range) -> None:
        self.dropped.append((key, list(ranks)))


def make_handles(pool: Any, key: int) -> list[Any]:
    from mindspeed_rlxf.cluster.ray.rows import CallRows, RayHandle

    rows = CallRows(pool, key, 0, ["reply", "reply"])
    return [RayHandle(rows, Origin("critic", rank, "host", "values")) for rank in range(2)]


def make_request(args: tuple[Any, ...], leads: bool = True) -> Request:
    return Request(Role.CRITIC, "values", args, leads, 4)


def test_a_request_arrives_with_the_places_of_its_rows(message: Any) -> None:
    from mindspeed_rlxf.cluster.ray.rows import KeptHandle

    rows = RowsRef(tuple(Piece(handle, 2) for handle in make_handles(Pool(), 5)), (1, 0))
    (sent,) = message.pack_requests([make_request((rows, 0.5))], 8, [[3, 4]])
    envelope = message.open_envelope(sent)
    assert (envelope.key, envelope.dropped, envelope.keeps_rows) == (8, [3, 4], True)
    assert (envelope.role, envelope.method) == ("critic", "values")
    request = message.read_request(envelope)
    origins = [Origin("critic", rank, "host", "values") for rank in range(2)]
    pieces = [Piece(KeptHandle(name, 5, o), 2) for name, o in zip("ab", origins, strict=True)]
    assert request == make_request((RowsRef(tuple(pieces), (1, 0)), 0.5))
    assert repr(pieces[0].handle) == "rows of critic.values from rank 0"


def test_ranks_of_a_replica_share_the_bytes_of_their_arguments(message: Any) -> None:
    first, second = (["x" * 100],), (["y" * 100],)
    requests = [make_request(first), make_request(first, leads=False), make_request(second)]
    one, two, three = (
        message.open_envelope(m) for m in message.pack_requests(requests, 1, [[], [], []])
    )
    assert (one.keeps_rows, two.keeps_rows) == (True, False)
    assert one.body == two.body != three.body
    assert [message.read_request(e) for e in (one, two, three)] == requests


def test_a_role_is_built_by_a_function_that_no_module_has(message: Any) -> None:
    request = Request(Role.CRITIC, BUILD, (2,), True, None, factory=lambda n: n + 1)
    (sent,) = message.pack_requests([request], 1, [[]])
    factory = message.read_request(message.open_envelope(sent)).factory
    assert factory is not None and factory(2) == 3


def test_a_reply_may_be_of_a_class_that_no_module_has(message: Any) -> None:
    class Report:
        loss = 0.25

    reply = message.read_reply(message.pack_reply(Reply(Report(), 4, 0.5, rank=1)))
    assert (reply.report.loss, reply.num_rows, reply.rank) == (0.25, 4, 1)


def test_rows_are_dropped_when_no_handle_is_left(message: Any) -> None:
    pool = Pool()
    handles = make_handles(pool, 5)
    assert message.pack_requests(
        [make_request((handles[0],))], 8, [[]]
    )  # what was sent keeps nothing
    handles.pop()
    assert pool.dropped == []
    handles.clear()
    assert pool.dropped == [(5, [0, 1])]
