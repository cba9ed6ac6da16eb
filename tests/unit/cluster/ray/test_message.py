"""Requests to Ray workers carry each argument once, and rows by reference."""

from __future__ import annotations

import dataclasses
import json
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_rlxf.cluster.errors import Origin
from mindspeed_rlxf.cluster.protocol import BUILD, Request
from mindspeed_rlxf.cluster.refs import Piece, RowsRef
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.data.batch import ExperienceInputs


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
    names = [field.name for field in dataclasses.fields(ExperienceInputs)]
    inputs = ExperienceInputs(**dict.fromkeys(names) | {"rollouts": rows, "kl_coef": 0.5})
    ((sent,),) = message.make_messages([make_request((rows, inputs, "text"))], 8, [[3, 4]])
    asked = message.Message(*json.loads(json.dumps(sent)))  # nothing is left to a pickler
    assert (asked.key, asked.dropped) == (8, [3, 4])
    origins = [Origin("critic", rank, "host", "values") for rank in range(2)]
    pieces = [Piece(KeptHandle(name, 5, o), 2) for name, o in zip("ab", origins, strict=True)]
    there = RowsRef(tuple(pieces), (1, 0))
    wanted = make_request((there, dataclasses.replace(inputs, rollouts=there), "text"))
    assert message.read_request(asked, None) == wanted
    assert repr(pieces[0].handle) == "rows of critic.values from rank 0"
    whole = dataclasses.replace(rows, selection=None)
    ((sent,),) = message.make_messages([make_request((whole,))], 8, [[]])
    assert message.read_request(message.Message(*sent), None).args[0].selection is None


def test_rows_inside_other_arguments_are_left_to_ray(message: Any) -> None:
    from mindspeed_rlxf.cluster.ray.rows import KeptHandle

    handle = make_handles(Pool(), 5)[1]
    inputs = {"more": [RowsRef((Piece(handle, 2),))]}
    ((sent,),) = message.make_messages([make_request((inputs,))], 8, [[]])
    asked = message.Message(*pickle.loads(pickle.dumps(sent)))
    (found,) = message.read_request(asked, None).args
    assert found["more"][0].pieces[0].handle == KeptHandle("b", 5, handle.origin)


def test_ranks_of_a_replica_share_the_form_of_their_arguments(message: Any) -> None:
    first, second = (["x"], 1), (["y"], 1)
    requests = [make_request(first), make_request(first, leads=False), make_request(second)]
    sent = [each for (each,) in message.make_messages(requests, 1, [[], [], []])]
    one, two, three = (message.Message(*each) for each in sent)
    assert one.args is two.args is not three.args
    assert [message.read_request(each, None) for each in (one, two, three)] == requests


def test_what_builds_a_role_is_stored_once_for_all_ranks(
    message: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: list[Any] = []
    monkeypatch.setattr(message.ray, "put", lambda value: stored.append(value) or "stored")
    build = Request(Role.CRITIC, BUILD, (2,), True, None, factory=dict)
    (one, where), (two, _) = message.make_messages([build] * 2, 1, [[], [7]])
    assert stored == [(dict, (2,))] and where == "stored"
    assert [message.Message(*each).dropped for each in (one, two)] == [[], [7]]
    assert message.read_request(message.Message(*one), stored[0]) == build


def test_rows_are_dropped_when_no_handle_is_left(message: Any) -> None:
    pool = Pool()
    handles = make_handles(pool, 5)
    assert message.make_messages(
        [make_request((handles[0],))], 8, [[]]
    )  # what was sent keeps nothing
    handles.pop()
    assert pool.dropped == []
    handles.clear()
    assert pool.dropped == [(5, [0, 1])]
