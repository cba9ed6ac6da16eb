"""Rules of programs in scoring processes: settings reach them, and nothing is left running."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mindspeed_rlxf.config.enums import SandboxLevel
from mindspeed_rlxf.config.errors import UserError
from mindspeed_rlxf.config.sandbox import SandboxConfig
from mindspeed_rlxf.config.schema import RewardConfig
from mindspeed_rlxf.rewards.outcome import Cause, Sample, ScoringBroken
from mindspeed_rlxf.rewards.plans import make_plan
from mindspeed_rlxf.rewards.sandbox.levels import PREVENTS
from mindspeed_rlxf.rewards.sandbox.runner import START, Sandbox
from mindspeed_rlxf.rewards.workers import WorkerPool

TRUTH = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]})
ADD = "print(sum(map(int, input().split())))"
SPAWN = "import os\nfor _ in range(3):\n    os.fork()\nwhile True:\n    pass"
MEMORY = 4 * 2**30
STRONGEST = next(iter(PREVENTS))


def sample(program: str) -> Sample:
    return Sample("", f"```python\n{program}\n```", TRUTH, "mine")


def reward(**sandbox: Any) -> RewardConfig:
    keys = {"kind": "rule", "rules": {"mine": "code"}, "sandbox": {"weak": True, **sandbox}}
    return RewardConfig.model_validate(keys)


@functools.cache
def reason_against(level: SandboxLevel) -> str:
    try:
        with Sandbox.choose(SandboxConfig(level=level, weak=level is SandboxLevel.LIMITS)):
            return ""
    except UserError as error:
        return f"level {level.value} does not work here: {error}"


def skip_without(level: SandboxLevel) -> None:
    if reason := reason_against(level):
        pytest.skip(reason)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files of the processes that score, and of their sandboxes."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


SHORT = (STRONGEST, SandboxLevel.LIMITS)
LEVELS = [
    pytest.param(level, id=level.value, marks=() if level in SHORT else pytest.mark.long)
    for level in PREVENTS
]


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest, temporary: Path) -> Iterator[SandboxLevel]:
    """After the test nothing of this level is running, and no file of it is left."""
    skip_without(request.param)
    assert not list(temporary.iterdir())
    before = wardens()
    yield request.param
    deadline = time.monotonic() + 10
    while (left := wardens() - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left, "processes of a sandbox are left running"
    assert not list(temporary.iterdir()), "files of a sandbox are left"


def wardens() -> set[int]:
    """The processes that start programs, and the programs."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = process.cmdline()
            if START in line or any(word.endswith("program.py") for word in line):
                found.add(process.pid)
    return found


def test_a_killed_scoring_process_takes_its_programs_with_it(level: SandboxLevel) -> None:
    """The deadline of the sample passes while a program with eight processes is running. Programs
    before and after it run within the memory limit that the scoring process has."""
    pool = WorkerPool(make_plan(reward(level=level, cpu_s=60, wall_s=60)), 1, 1.5, MEMORY)
    good = pool.submit(sample(ADD)).result(60)
    late = pool.submit(sample(SPAWN)).result(60)
    after = pool.submit(sample(ADD)).result(60)
    pool.close()
    assert late.cause is Cause.TIMEOUT
    assert good.result == after.result and good.result is not None


@pytest.mark.parametrize("level", SHORT, indirect=True)
def test_programs_end_with_a_scoring_process_that_ends_by_itself(level: SandboxLevel) -> None:
    """It is killed from outside while a program is running, and the pool goes on."""
    before = set(psutil.Process().children())
    pool = WorkerPool(make_plan(reward(level=level, cpu_s=60, wall_s=60)), 1, 60.0, MEMORY)
    assert pool.submit(sample(ADD)).result(60).result is not None
    running = pool.submit(sample(SPAWN))
    (process,) = set(psutil.Process().children()) - before
    deadline = time.monotonic() + 20
    while len(process.children(recursive=True)) < 6 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    assert running.result(60).cause is Cause.EXIT
    assert pool.submit(sample(ADD)).result(60).result is not None
    pool.close()


def test_a_scoring_process_has_the_sandbox_of_the_configuration(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """With 40 MiB a program that takes 100 MiB fails; by default it passes."""
    skip_without(SandboxLevel.AUTO)
    takes = f"import time\nx = b'x' * (100 << 20)\ntime.sleep(0.5)\n{ADD}"  # seen meanwhile
    for keys, score in (({}, 1.0), ({"memory_mb": 40}, 0.0)):
        pool = WorkerPool(make_plan(reward(**keys)), 1, 30.0, MEMORY)
        outcome = pool.submit(sample(takes)).result(60)
        pool.close()
        assert outcome.result is not None and outcome.result.score == score
    assert capfd.readouterr().out.count("sandbox: ") == 2, "once for each pool"


def test_a_host_without_isolation_ends_the_scoring() -> None:
    plan = make_plan(reward(level="uid", weak=False, python="/nowhere/python3"))
    pool = WorkerPool(plan, 1, 30.0, MEMORY)
    with pytest.raises(ScoringBroken, match=r"did not start: .*reward\.sandbox\.level"):
        pool.submit(sample(ADD)).result(60)
    pool.close()


def test_a_sandbox_that_stops_working_ends_the_scoring(tmp_path: Path) -> None:
    """A score of 0 for a program that never ran would be learnt from."""
    skip_without(SandboxLevel.LIMITS)
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\nexec {os.path.realpath("/usr/bin/python3")} "$@"\n')
    python.chmod(0o755)
    plan = make_plan(reward(level="limits", python=str(python)))
    pool = WorkerPool(plan, 1, 30.0, MEMORY)
    assert pool.submit(sample(ADD)).result(60).result is not None
    python.unlink()
    for _ in range(2):
        with pytest.raises(ScoringBroken):
            pool.submit(sample(ADD)).result(60)
    pool.close()
