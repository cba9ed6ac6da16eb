"""The guard process ends a cluster's processes when the driver is gone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from mindspeed_rlxf.cluster.ray import orphan_guard
from mindspeed_rlxf.cluster.ray.orphans import OrphanGuard


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_a_killed_guard_is_replaced_and_the_next_one_gets_its_pids(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "cluster"
    folder.mkdir()
    sleeper = "import time; time.sleep(300)"
    named = subprocess.Popen([sys.executable, "-c", sleeper, str(folder)])
    watched = subprocess.Popen([sys.executable, "-c", sleeper])
    guard = OrphanGuard(folder)
    try:
        guard.watch([watched.pid, guard.pid])
        first = guard.pid
        psutil.Process(first).kill()
        assert until(lambda: guard.pid != first and psutil.pid_exists(guard.pid))
        guard.end()
        assert (named.wait(20), watched.wait(20)) == (-9, -9)
        assert not folder.exists()
        assert until(lambda: not psutil.pid_exists(guard.pid))
    finally:
        for process in (named, watched):
            process.kill()
            process.wait()
        guard.end()


def test_a_process_of_another_user_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, signal: int) -> None:
        raise PermissionError(f"{pid} is root's")  # as `sudo tail` of a file in the folder

    monkeypatch.setattr(os, "kill", refuse)
    orphan_guard.kill(1)
