"""Rules of programs in scoring processes: settings reach them, and nothing is left running."""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mindspeed_rlxf.config.reward_section import SandboxConfig
from mindspeed_rlxf.config.schema import RewardConfig
from mindspeed_rlxf.rewards.outcome import Cause, Sample
from mindspeed_rlxf.rewards.plans import make_plan
from mindspeed_rlxf.rewards.workers import WorkerPool
from tests.bubblewrap import open_sandbox

TRUTH = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]})
ADD = "print(sum(map(int, input().split())))"
SPAWN = "import os, time\nfor _ in range(3):\n    os.fork()\ntime.sleep(600)"
MEMORY = 4 * 2**30


def sample(program: str) -> Sample:
    return Sample("", f"```python\n{program}\n```", TRUTH, "mine")


def reward(**sandbox: Any) -> RewardConfig:
    keys = {"kind": "rule", "rules": {"mine": "code"}, "sandbox": sandbox}
    return RewardConfig.model_validate(keys)


@pytest.fixture(params=["bubblewrap", "unsafe"])
def keys(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Any]]:
    """Keys of the sandbox; after the test no program is running."""
    if request.param == "bubblewrap":
        open_sandbox(SandboxConfig())
    else:
        (tmp_path / "bin").mkdir()
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    before = programs()
    yield {"unsafe": request.param == "unsafe"}
    deadline = time.monotonic() + 10
    while (left := programs() - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left, "programs are left running"


def programs() -> set[int]:
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any("RLIMIT_CPU" in word for word in process.cmdline()):
                found.add(process.pid)
    return found


def test_a_killed_scoring_process_takes_its_programs_with_it(keys: dict[str, Any]) -> None:
    """The deadline of the sample passes while a program with eight processes is running. Programs
    before and after it run within the memory limit that the scoring process has."""
    pool = WorkerPool(make_plan(reward(**keys, cpu_s=60, wall_s=60)), 1, 5.0, MEMORY)
    good = pool.submit(sample(ADD)).result(60)
    late = pool.submit(sample(SPAWN)).result(60)
    after = pool.submit(sample(ADD)).result(60)
    pool.close()
    assert late.cause is Cause.TIMEOUT
    assert good.result == after.result and good.result is not None


def test_a_scoring_process_has_the_sandbox_of_the_configuration() -> None:
    """With 40 MiB a program that takes 100 MiB fails; by default it passes."""
    open_sandbox(SandboxConfig())
    takes = f"import time\nx = b'x' * (100 << 20)\ntime.sleep(0.5)\n{ADD}"  # seen meanwhile
    for keys, score in (({}, 1.0), ({"memory_mb": 40}, 0.0)):
        pool = WorkerPool(make_plan(reward(**keys)), 1, 30.0, MEMORY)
        outcome = pool.submit(sample(takes)).result(60)
        pool.close()
        assert outcome.result is not None and outcome.result.score == score
