"""Whatever a reward function does, its sample fails with a cause, and nothing is left running."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mindspeed_rlxf.config.plugins import Source
from mindspeed_rlxf.config.reward_section import FunctionConfig
from mindspeed_rlxf.rewards import workers
from mindspeed_rlxf.rewards.outcome import Cause, Sample
from mindspeed_rlxf.rewards.scoring import Plan
from mindspeed_rlxf.rewards.workers import ScoringBroken, WorkerPool

FILE = Path(__file__).with_name("hostile_functions.py")
SOURCE = Source(str(FILE), FILE.read_text(encoding="utf-8"))


def part(name: str, function: str, source: Source, **keys: Any) -> tuple[FunctionConfig, Source]:
    return FunctionConfig(name=name, function=f"{source.file}:{function}", **keys), source


PARTS = (
    part("exact", "score", SOURCE, weight=2.0, arguments={"scale": 3.0}, data_sources=("mine",)),
    part("later", "score_async", SOURCE, data_sources=("mine", "other")),
)
PLAN = Plan(PARTS, {"gsm8k": "gsm8k", "broken": "no such rule"})
MEMORY = 4 * 2**30


def sample(response: str, data_source: str = "mine") -> Sample:
    return Sample("1+1=", response, "2", data_source, {"level": 7})


def children() -> list[psutil.Process]:
    """Processes of the pool, without zombies: this process may be a subreaper (`Sandbox`)."""
    found = [p for p in psutil.Process().children(recursive=True) if p.status() != "zombie"]
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cmdline() == ["sleep", "4242"]:
                found.append(process)
    return found


@pytest.fixture
def pool(request: pytest.FixtureRequest) -> Iterator[WorkerPool]:
    """A pool whose limit only a sample that hangs reaches, however busy the machine is."""
    pool = WorkerPool(PLAN, size=2, timeout_s=getattr(request, "param", 60.0), memory=MEMORY)
    before = {process.pid for process in children()}
    yield pool
    pool.close()
    deadline = time.monotonic() + 10
    while (left := [p for p in children() if p.pid not in before]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left, "processes are left running"


CAUSES = {
    "raise": Cause.EXCEPTION,
    "interrupt": Cause.EXCEPTION,
    "nan": Cause.NOT_FINITE,
    "inf": Cause.NOT_FINITE,
    "text": Cause.WRONG_RESULT,
    "wrong length": Cause.WRONG_RESULT,
    "no score": Cause.WRONG_RESULT,
    "exit": Cause.EXIT,
    "exit at once": Cause.EXIT,
    "crash": Cause.EXIT,
    "memory": Cause.MEMORY,
    "close": Cause.EXIT,
}


def test_every_failure_has_its_cause_and_touches_no_other_sample(
    pool: WorkerPool, capfd: pytest.CaptureFixture[str]
) -> None:
    futures = {}
    for number, action in enumerate([*CAUSES, "leave a process", "whisper", "none"]):
        futures[action] = pool.submit(sample(action))
        futures[f"good {number}"] = pool.submit(sample("2"))
    found = {name: future.result(60) for name, future in futures.items()}
    assert {name: found[name].cause for name in CAUSES} == CAUSES
    good = {name: outcome for name, outcome in found.items() if name not in CAUSES}
    assert all(outcome.result is not None for outcome in good.values()), good
    assert found["raise"].message == "ZeroDivisionError: of this reward"
    assert found["crash"].message == "its process ended by SIGSEGV"
    assert "heard" in capfd.readouterr().err


@pytest.mark.parametrize("pool", [3.0], indirect=True)
def test_a_sample_that_hangs_ends_at_its_limit_and_its_process_is_replaced(
    pool: WorkerPool,
) -> None:
    hangs = [pool.submit(sample(action)) for action in ("hang", "hang in C")]
    good = pool.submit(sample("2"))
    assert [future.result(60).cause for future in hangs] == [Cause.TIMEOUT, Cause.TIMEOUT]
    assert good.result(60).result is not None


def test_a_sample_that_is_stopped_as_it_ends_takes_no_other_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = WorkerPool(PLAN, size=1, timeout_s=60.0, memory=MEMORY)
    first, second = (pool.submit(sample("pause")) for _ in range(2))
    kill = workers._Process.kill

    def kill_late(process: workers._Process) -> None:
        first.result(60)
        time.sleep(0.2)  # for the second to begin
        kill(process)

    while not first.running():
        time.sleep(0.01)
    with monkeypatch.context() as patch:
        patch.setattr(workers._Process, "kill", kill_late)
        pool.stop(first)
    assert [future.result(60).result is not None for future in (first, second)] == [True, True]
    pool.close()


def test_scores_of_the_parts_that_apply_are_weighted_and_added(pool: WorkerPool) -> None:
    def score(response: str, data_source: str) -> tuple[float, dict[str, float]]:
        result = pool.submit(sample(response, data_source)).result(60).result
        assert result is not None
        return result.score, result.parts

    later = {"later": 0.5, "later/length": 1.0, "later/extra": 7.0}
    assert score("2", "mine") == (2 * 3.0 + 0.5, {"exact": 3.0, **later})
    assert score("3", "mine") == (0.5, {"exact": 0.0, **later})
    assert score("2", "other") == (0.5, later)
    assert score("2.0", "gsm8k") == (1.0, {"accuracy": 1.0}), "no part applies: its rule"
    assert pool.submit(sample("2", "broken")).result(60).cause is Cause.EXCEPTION


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise ImportError('not on this host')", "ImportError: not on this host"),
        ("import os\nos._exit(9)", "exit code 9"),
    ],
)
def test_a_file_that_does_not_run_there_ends_the_scoring(text: str, said: str) -> None:
    mine = part("score", "score", Source("/x/mine.py", text))
    pool = WorkerPool(Plan((mine,), {}), size=2, timeout_s=60.0, memory=MEMORY)
    futures = [pool.submit(sample("2")) for _ in range(3)]
    for future in futures:
        with pytest.raises(ScoringBroken, match=said):
            future.result(60)
    pool.close()
    with pytest.raises(ScoringBroken):
        pool.submit(sample("2")).result(60)


def test_a_forgotten_pool_ends_its_processes() -> None:
    before = set(psutil.Process().children())
    pool = WorkerPool(PLAN, size=1, timeout_s=60.0, memory=MEMORY)
    hangs = pool.submit(sample("hang"))
    first = pool.submit(sample("2"))
    while not (started := set(psutil.Process().children()) - before):
        time.sleep(0.01)
    (process,) = started
    del pool
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    for future in (hangs, first):
        with pytest.raises(ScoringBroken, match="was closed"):
            future.result(60)
