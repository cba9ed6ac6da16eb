"""Diagnosis of processes from outside: running, waiting, stopped and gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.cluster import witness
from mindspeed_rlxf.cluster.errors import DIED, Origin, RuntimeTimeout, WorkerError
from mindspeed_rlxf.cluster.host_agent import Function, HostCall
from mindspeed_rlxf.cluster.nodes import Place
from mindspeed_rlxf.cluster.witness import (
    GONE,
    SILENT,
    STOPPED,
    Sighting,
    Subject,
    Watched,
    copy_logs,
    explain_death,
    explain_timeout,
    inspect_hosts,
    inspect_workers,
)
from tests.unit.cluster.agents import InProcess

ROOT = Path(__file__).parents[3]
WORKER = """
from mindspeed_rlxf.cluster.witness import show_stacks_on_signal
import threading, time
show_stacks_on_signal()
def busy():
    print("ready", flush=True)
    time.sleep(600)
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
busy()
"""


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[list[Subject]]:
    """Three processes that write to logs."""
    processes, subjects = [], []
    for rank in range(3):
        log = tmp_path / f"rank_{rank}.log"
        with open(log, "wb") as stream:
            process = subprocess.Popen(
                [sys.executable, "-S", "-c", WORKER],
                stdout=stream,
                stderr=stream,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
        processes.append(process)
        subjects.append(Subject(rank, process.pid, str(log)))
    deadline = time.monotonic() + 30
    while any("ready" not in Path(s.log).read_text() for s in subjects):
        assert time.monotonic() < deadline and all(p.poll() is None for p in processes)
        time.sleep(0.02)
    yield subjects
    for process in processes:
        process.kill()
        process.wait()


def test_stacks_of_all_threads_go_to_the_log_and_states_are_reported(
    workers: list[Subject],
) -> None:
    os.kill(workers[1].pid, signal.SIGSTOP)
    os.kill(workers[2].pid, signal.SIGKILL)
    os.waitpid(workers[2].pid, 0)
    alive, stopped, gone = inspect_workers(workers, stacks=True)
    assert (stopped.state, gone.state) == (STOPPED, GONE)
    assert "in busy" in alive.tail and alive.tail.count("hread 0x") == 2
    assert "hread 0x" not in stopped.tail  # no signal waits for it
    before = Path(workers[0].log).stat().st_size
    (again,) = inspect_workers(workers[:1], stacks=False)
    assert again.state == "is alive" and Path(workers[0].log).stat().st_size == before


def test_equal_ranks_of_two_pools_on_one_host_have_their_own_stacks(
    workers: list[Subject], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(witness, "STACK_S", 2.0)
    with open(workers[1].log, "a") as stream:
        stream.write("earlier output\n" * 5000)  # more than the stacks of the other one
    first, _ = inspect_workers([workers[0], replace(workers[1], rank=0)], stacks=True)
    assert first.state == "has no call to work on"


def test_a_process_that_takes_no_signal_is_reported(
    workers: list[Subject], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(witness, "STACK_S", 0.3)
    monkeypatch.setattr(witness, "STACK_SIGNAL", 0)  # arrives nowhere
    (silent,) = inspect_workers(workers[:1], stacks=True)
    assert silent.state == SILENT and not silent.waits


def frames(*names: str) -> str:
    """A stack dump as faulthandler writes it, the innermost frame first."""
    lines = [f'  File "/x/{name.rpartition(":")[0]}", line 1 in {name.rpartition(":")[2]}\n'
             for name in names]  # fmt: skip
    other = 'Thread 0x1 (most recent call first):\n  File "/x/threading.py", line 1 in wait\n\n'
    return f"{other}Current thread 0x2 (most recent call first):\n{''.join(lines)}"


HOST = ("mindspeed_rlxf/cluster/worker.py:run", "default_worker.py:<module>")


@pytest.mark.parametrize(
    ("stack", "state", "waits"),
    [
        (
            ("torch/distributed/distributed_c10d.py:all_reduce",
             "torch/distributed/c10d_logger.py:wrapper", "mindspeed_rlxf/engine/a.py:step", *HOST),
            "waits for others in all_reduce", True,
        ),
        (
            ("json/decoder.py:decode", "mindspeed_rlxf/rewards/rules.py:score", *HOST),
            "is in decoder.decode from rules.score", False,
        ),
        (("mindspeed_rlxf/rewards/rules.py:score", *HOST), "is in rules.score", False),
        (
            ("ray/worker.py:wait", "mindspeed_rlxf/cluster/ray/wait.py:fetch_rows", *HOST),
            "waits for rows", True,
        ),
        (("default_worker.py:<module>",), "has no call to work on", False),
    ],
)  # fmt: skip
def test_a_stack_shows_whether_its_rank_waits(
    stack: tuple[str, ...], state: str, waits: bool
) -> None:
    assert witness.describe_stack(frames(*stack)) == (state, waits)


def sightings(*states: tuple[str, bool] | None) -> dict[tuple[str, int], Sighting]:
    return {("main", rank): Sighting(rank, *s, "") for rank, s in enumerate(states) if s}


def test_ranks_that_wait_for_others_are_not_the_ones_that_did_not_arrive() -> None:
    error = RuntimeTimeout("critic.values", 30, [0, 1, 2, 3], hosts=["a", "a", "b", "b"])
    wait = ("waits for others in all_reduce", True)
    found = explain_timeout(error, "main", [], sightings(wait, wait, (STOPPED, False)))
    assert str(found) == (
        "critic.values: ranks 2, 3 did not arrive within 30 s; each of ranks 0, 1 waits for others "
        f"in all_reduce; rank 2 {STOPPED}; rank 3 is on a node that does not answer; the logs of "
        "all ranks have their stacks"
    )
    assert (found.role, found.phase, found.rank, found.host) == ("critic", "values", 2, "b")
    error = RuntimeTimeout("critic.values", 30, [0, 1])
    both = explain_timeout(error, "main", [], sightings(wait, wait))
    assert both.missing == [0, 1]  # they wait for each other


def test_the_ranks_that_make_the_rows_are_reported() -> None:
    seen = sightings(("waits for rows", True)) | {("judge", 1): Sighting(1, STOPPED, False, "")}
    error = RuntimeTimeout("critic.values", 30, [0])
    maker = Origin("reward", 1, "b", "score", pool="judge")
    found = explain_timeout(error, "main", [maker], seen)
    assert str(found) == (
        "reward.score: rank 1 did not arrive within 30 s; critic.values: rank 0 waits for rows; "
        f"waiting for rows of reward.score from rank 1; judge rank 1 {STOPPED}; the logs of all "
        "ranks have their stacks"
    )
    assert (found.role, found.rank, found.host) == ("reward", 1, "b")
    busy = seen | {("judge", 1): Sighting(1, "waits for others in all_reduce", True, "")}
    found = explain_timeout(error, "main", [maker], busy)
    assert found.role == "critic", "the judge waits for others itself"


def test_a_rank_that_made_rows_and_cannot_give_them_is_named() -> None:
    """It replied, so no call of its own is late."""
    keepers = [Origin("rollout", rank, "b", "generate", pool="main") for rank in (1, 2)]
    error = RuntimeTimeout("actor_rollout.log_probs", 30, [0], hosts=["a"])
    idle = ("has no call to work on", False)
    seen = sightings(("waits for rows", True), (STOPPED, False), idle)
    found = explain_timeout(error, "main", [], seen, keepers)
    assert str(found).startswith(
        "rollout.generate: rank 1 did not arrive within 30 s; actor_rollout.log_probs: rank 0 "
        "waits for rows; waiting for rows of rollout.generate from rank 1; "
        f"main rank 1 {STOPPED}; the"
    )
    assert (found.role, found.phase, found.rank, found.host) == ("rollout", "generate", 1, "b")
    busy = sightings(("is in scoring.call", False), (STOPPED, False), idle)
    assert explain_timeout(error, "main", [], busy, keepers).role == "actor_rollout"


def test_logs_of_other_hosts_are_copied_and_our_own_are_left_alone(tmp_path: Path) -> None:
    place, agent = Place("node2", "10.0.0.2", 0, ()), InProcess("node2")
    workers = [
        Watched("main", rank, place, str(tmp_path / f"{rank}.log"), agent) for rank in range(3)
    ]
    (tmp_path / "0.log").write_text("here\n")
    seen = {("main", rank): Sighting(rank, GONE, False, f"words {rank}\n") for rank in (0, 1)}
    copy_logs(workers, seen)
    assert (tmp_path / "0.log").read_text() == "here\n"
    assert (tmp_path / "1.log").read_text() == (
        "[the end of this log, fetched from node2]\nwords 1\n"
    )
    assert not (tmp_path / "2.log").exists()  # not inspected
    copy_logs(workers, {("main", 1): Sighting(1, GONE, False, "later\n")})
    assert (tmp_path / "1.log").read_text().endswith("]\nlater\n")


class Lost(InProcess):
    def start(self, function: Function, *args: Any, timeout_s: float) -> HostCall:
        return super().start(int, "its node went away", timeout_s=timeout_s)


def test_workers_on_answering_hosts_are_inspected_and_lost_hosts_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "log").write_text("last words\n")
    here, there = InProcess("node1"), Lost("node2")
    place = Place("", "", 0, (), pid=os.getpid())
    workers = [
        Watched("main", rank, place, str(tmp_path / "log"), agent)
        for rank, agent in enumerate([here, there, here])
    ]
    found = inspect_hosts(workers, stacks=False)
    assert {key: (s.rank, s.state, s.tail) for key, s in found.items()} == {
        ("main", rank): (rank, "is alive", "last words\n") for rank in (0, 2)
    }
    (said,) = caplog.messages
    assert said.startswith("cannot fetch stacks and logs of the ranks on node2: ValueError: ")


def test_a_death_is_explained_by_processes_that_the_kernel_killed_for_memory() -> None:
    died = WorkerError("critic", 1, "b", "values", f"{DIED} (killed)", "all that is known")
    assert explain_death(died, 0) is died
    found = explain_death(died, 2)
    assert "its host ran out of memory: the kernel killed 2 of its processes" in found.cause
    assert (found.rank, found.remote_traceback) == (1, "all that is known")
    raised = WorkerError("critic", 1, "b", "values", "ValueError: x")
    assert explain_death(raised, 2) is raised


def test_kills_for_memory_are_counted() -> None:
    assert witness.oom_kills() >= 0


def test_a_tail_is_the_end_of_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "log").write_bytes(b"first\xff second")
    monkeypatch.setattr(witness, "TAIL_BYTES", 7)
    assert witness.read_tail(str(tmp_path / "log")) == " second"
    assert witness.read_tail(str(tmp_path / "none")) == witness.read_tail("") == ""
