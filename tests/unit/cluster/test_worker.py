"""A worker builds roles, calls them, and reports results and failures."""

import io
import json
import pickle
import time
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_rlxf.cluster.errors import WorkerError
from mindspeed_rlxf.cluster.interface import BUILD, ColocatedRole, Request
from mindspeed_rlxf.cluster.refs import RankRows, RowsRef
from mindspeed_rlxf.cluster.worker import RoleHost, to_host
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.data.batch import RoleOutput, Rows, TokenLog, TokenRows
from tests.distributed.cluster.stand_ins import Numbers


class Doubler:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def double(self, rows: Numbers) -> RoleOutput:
        return RoleOutput(Numbers(rows.numbers * self.factor), {"count": rows.num_rows})

    def fail(self, message: str) -> RoleOutput:
        raise RuntimeError(message)

    def log(self, rows: Numbers, log: TokenLog) -> RoleOutput:
        numbers = rows.numbers.float().view(3, 1)
        columns = (torch.ones(3, dtype=torch.long), numbers, None, 2 * numbers)
        return RoleOutput(rows, token_rows=TokenRows(log, [10, 11, 12], *columns))


def make_host() -> RoleHost:
    host = RoleHost(3, lambda handles: [Numbers(torch.arange(3)) for _ in handles])
    host.run(Request(Role.CRITIC, BUILD, (2,), True, None, Doubler))
    return host


def run(method: str, *args: Any, leads: bool = True) -> Any:
    return make_host().run(Request(Role.CRITIC, method, args, leads))


def test_references_are_resolved_before_the_method_runs() -> None:
    rows, reply = run("double", RowsRef((RankRows("piece", 3),)).take([2, 1]))
    assert rows.numbers.tolist() == [4, 2]
    assert (reply.report, reply.num_rows) == ({"count": 2}, 2)
    assert 0 <= reply.seconds < 10


def test_a_rank_that_does_not_lead_sends_neither_rows_nor_report() -> None:
    before = time.time()
    rows, reply = run("double", Numbers(torch.arange(3)), leads=False)
    assert rows is None
    assert (reply.report, reply.num_rows, reply.rank) == (None, None, 3)
    assert before <= reply.started <= time.time()


def test_the_leader_writes_logged_tokens_to_the_file_of_its_rank(tmp_path: Path) -> None:
    log = TokenLog(str(tmp_path / "tokens"), 7, frozenset([12, 99]))
    run("log", Numbers(torch.arange(3)), log, leads=False)
    assert not (tmp_path / "tokens").exists()
    run("log", Numbers(torch.arange(3)), log)
    file = tmp_path / "tokens" / "rank_00003.jsonl"
    line = {"iteration": 7, "sample_id": 12, "advantage": [2], "value": [4]}
    assert [json.loads(each) for each in file.read_text().splitlines()] == [line]


def test_a_lost_peer_is_no_first_cause() -> None:
    with pytest.raises(WorkerError) as caught, redirect_stderr(io.StringIO()):
        run("fail", "[gloo] Connection closed by peer [127.0.0.1]:1")
    assert caught.value.is_aftermath


def test_a_role_is_built_with_the_object_of_another_in_its_process() -> None:
    host = make_host()
    built = Request(
        Role.REF, BUILD, (ColocatedRole(Role.CRITIC),), True, None, lambda d: Doubler(d.factor)
    )
    host.run(built)
    rows, _ = host.run(Request(Role.REF, "double", (Numbers(torch.arange(3)),), True))
    assert rows.numbers.tolist() == [0, 2, 4]  # type: ignore[union-attr]
    missing = Request(Role.REF, BUILD, (ColocatedRole(Role.ACTOR_ROLLOUT),), True, None, Doubler)
    with (
        pytest.raises(WorkerError, match="actor_rollout has not been built in this process"),
        redirect_stderr(io.StringIO()),
    ):
        host.run(missing)


def test_the_failure_of_another_rank_passes_through_unchanged() -> None:
    first = WorkerError("ref", 1, "host-b", "log_probs", "ValueError: bad")

    def fetch(handles: list[Any]) -> list[Rows]:
        raise first

    host = RoleHost(0, fetch)
    with pytest.raises(WorkerError) as caught:
        host.run(Request(Role.CRITIC, "double", (RowsRef((RankRows("piece", 1),)),), True))
    assert caught.value is first


def test_a_view_travels_without_the_storage_behind_it() -> None:
    view = torch.zeros(1000, 1000)[:, :1].squeeze(1)
    assert len(pickle.dumps(to_host(Numbers(view)))) < 10_000
