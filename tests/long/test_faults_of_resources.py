"""Faults from outside the training loop: a reward function, memory, a disk, a role that stops."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.long.conftest import Run
from tests.processes import ROOT

pytestmark = pytest.mark.long
NO_RESTART = "training.max_restarts=0"
SOON = "runtime.timeout_s=20"
# Python runs it when it starts; it changes the rule in Ray's workers alone.
RULE = """
import sys
if any("default_worker" in word for word in sys.orig_argv):
    from mindspeed_rlxf.rewards import rules
    calls = 0
    def rule(response, truth):
        global calls
        calls += 1
        if calls > 20:
            {act}
        return rules.exact_match(response, truth)
    for name in rules.RULES:
        rules.RULES[name] = rule
"""
RAISE = 'raise ZeroDivisionError("of this reward")'
GIB = 1 << 30
TAKE = f"import time; taken = bytearray(4 * {GIB}); time.sleep(60)"


def with_rule(folder: Path, act: str) -> dict[str, str]:
    """Environment in which the rule does something at its 21st call in a process."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(RULE.format(act=act))
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


def test_an_exception_of_a_reward_function_is_its_message(start: Any, tmp_path: Path) -> None:
    run = start(NO_RESTART, **with_rule(tmp_path / "path", RAISE))
    line = run.end_with_failure()
    assert "reward rank " in line and "ZeroDivisionError: of this reward" in line
    assert (run.failure()["role"], run.failure()["iteration"]) == ("reward", 6)
    assert "Traceback" not in run.log.read_text()
    assert "Traceback" in (run.folder / "logs" / "main" / "rank_00000.log").read_text()


def test_a_worker_that_takes_too_much_memory_is_named_with_the_cause(start, tmp_path):
    """Ray ends a worker when the host's memory is nearly used up: here, 2.5 GiB from now."""
    memory = psutil.virtual_memory()
    share = (memory.total - memory.available + 2.5 * GIB) / memory.total
    assert share < 0.8, "this test needs 4 GiB of memory"
    limits = {"RAY_memory_usage_threshold": f"{share:.3f}", "RAY_memory_monitor_refresh_ms": "100"}
    run = start(NO_RESTART, **with_rule(tmp_path / "path", TAKE), **limits)
    line = run.end_with_failure()
    assert "killed by Ray because its host ran out of memory" in line
    assert run.failure()["iteration"] == 6


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with 64 MiB."""
    if os.getuid() != 0:
        pytest.skip("mounting a file system needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_disk_is_named_and_the_run_resumes_when_there_is_room(start, small_disk):
    folder, ballast = small_disk / "run", small_disk / "ballast"
    save = "training.save_interval=2"
    run = start(NO_RESTART, save, folder=folder, until="checkpoint of iteration 2:")
    with pytest.raises(OSError), ballast.open("wb") as file:
        while True:
            file.write(bytes(1 << 16))
    line = run.end_with_failure()
    assert "No space left on device" in line
    pointer = folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    saved = int(pointer.read_text())
    assert saved >= 2
    ballast.unlink()
    again = start(NO_RESTART, save, folder=folder, until=f"checkpoint of iteration {saved + 2}:")
    again.process.send_signal(signal.SIGTERM)
    text = again.end(75)
    assert f"checkpoints/iter_{saved:07d}" in text and "damaged" not in text


ROLES = ("actor_rollout", "ref", "critic", "reward")


@pytest.mark.parametrize("role", ROLES)
def test_a_role_that_stops_is_named_within_its_deadline(start: Any, role: str) -> None:
    placement = [f"placement.{each}={each}" for each in ROLES]
    pools = [f"+resource_pool.{each}=1" for each in ROLES]
    run = start(NO_RESTART, SOON, "~resource_pool.main", *placement, *pools)
    log = run.folder / "logs" / role / "rank_00000.log"
    process_with(run, log).send_signal(signal.SIGSTOP)
    line = run.end_with_failure(within_s=90)
    # Actor and rollout share their processes: the one whose turn it was is named.
    named = (role, "rollout") if role == "actor_rollout" else (role,)
    assert line.startswith(tuple(f"failed: {each}." for each in named)), line
    assert "did not arrive within 20 s" in line and "no stack in its log: stopped" in line
    assert run.failure()["role"] in named and run.failure()["rank"] == 0


def test_a_rank_that_only_generates_and_stops_is_named(start: Any) -> None:
    """Of a pool that is split: one rank trains, one generates."""
    split = ["actor_rollout.num_gpus_for_train=1", "actor_rollout.num_gpus_for_infer=1"]
    pools = ["placement.actor_rollout=actor", "+resource_pool.actor=2", "resource_pool.main=1"]
    run = start(NO_RESTART, SOON, *split, *pools)
    process_with(run, run.folder / "logs" / "actor" / "rank_00001.log").send_signal(signal.SIGSTOP)
    line = run.end_with_failure(within_s=90)
    assert "did not arrive within 20 s" in line and "no stack in its log: stopped" in line
    # The transfer of weights is one call over both parts, under the name of the one that sends.
    calls = [("rollout", "advance"), ("rollout", "update_weights")]
    calls.append(("actor_rollout", "send_weights"))
    failure = run.failure()
    assert failure["rank"] == 1 and (failure["role"], failure["phase"]) in calls


def process_with(run: Run, log: Path) -> psutil.Process:
    """The worker whose output goes to that file."""
    (found,) = [p for p in run.named("RayWorker") if os.path.samefile(f"/proc/{p.pid}/fd/1", log)]
    return found
