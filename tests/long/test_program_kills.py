"""A run that is killed amid the conversation of a program, and goes on."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from mindspeed_rlxf.checkpoint.directory import RunDirectory
from tests.chaos.same_run import differences
from tests.chaos.tiny_run import settings
from tests.distributed import programs
from tests.processes import read_lines, run_python, start_logged, with_sources
from tests.unit.agents.served import Client

pytestmark = pytest.mark.long
ITERATIONS = 3
KILLED = 20  # a sample of the last iteration
WAIT_S = 240.0


def two_turns(row: dict[str, Any]) -> None:
    """As `programs.two_turns`; the program that leads KILLED first waits behind a turn."""
    mark = Path(os.environ["MARK"])
    if row["sample_id"] == KILLED and not mark.exists():
        client = Client(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
        client.say(row["messages"], max_tokens=3)
        mark.touch()
        time.sleep(WAIT_S)
    programs.two_turns(row)


def command(out: Path) -> list[str]:
    """Return the words after `python`."""
    changes = {
        "training.train_iters": ITERATIONS, "training.save_interval": 1,
        "training.seq_length": 24, "actor_rollout.max_prompt_length": 6,
        "actor_rollout.max_new_tokens": 16, "+reward.rules": "{arithmetic: agent}",
        "rollout.program": f"{__file__}:two_turns", "rollout.program_processes": 4,
        "logging.samples": "all", "device.kind": "cpu", "runtime": "local",
    }  # fmt: skip
    overrides = [*settings(out, devices=1), *(f"{key}={value}" for key, value in changes.items())]
    return ["ray_gpt.py", "--config-name", "ppo_trainer_tiny", *overrides]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_run_killed_amid_a_program_trains_every_sample_once(tmp_path: Path) -> None:
    whole, killed, mark = tmp_path / "whole", tmp_path / "killed", tmp_path / "mark"
    words = [sys.executable, *command(killed)]
    run = start_logged(words, tmp_path / "log", with_sources(MARK=str(mark)))
    try:
        wait_until(lambda: mark.exists() or run.poll() is not None)
        programs = psutil.Process(run.pid).children(recursive=True)
        assert programs
    finally:
        run.kill()
        run.wait()
    assert len(read_lines(killed / "metrics.jsonl")) == 2, (tmp_path / "log").read_text()
    _, alive = psutil.wait_procs(programs, timeout=20.0)
    assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]
    run_python(*command(killed), MARK=str(mark))
    ids = [sample["sample_id"] for sample in read_lines(killed / "samples.jsonl")]
    assert sorted(ids) == list(range(8 * ITERATIONS))
    run_python(*command(whole), MARK=str(mark))
    assert differences(RunDirectory(whole), RunDirectory(killed), ITERATIONS) == []
