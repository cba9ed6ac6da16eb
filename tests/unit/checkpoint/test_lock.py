"""A run directory has one live run; a holder that is gone does not keep others out."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mindspeed_rlxf.checkpoint import lock
from mindspeed_rlxf.config.problems import UserError

HOLDER = """
import sys
from pathlib import Path
from mindspeed_rlxf.checkpoint import lock
lock.BEAT_S = 0.05
if machine := sys.argv[2]:
    lock._machine = lambda: machine
lock.take(Path(sys.argv[1]))
print("held", flush=True)
for line in sys.stdin:
    try:
        lock.require(Path(sys.argv[1]))
        print("has it", flush=True)
    except lock.LockLost:
        print("lost it", flush=True)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT_S", 0.05)
    monkeypatch.setattr(lock, "STALE_S", 1.0)


@contextmanager
def held_by(folder: Path, machine: str = "") -> Iterator[subprocess.Popen[str]]:
    """A process with the lock. machine: empty = this one"""
    command = [sys.executable, "-c", HOLDER, str(folder), machine]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout and holder.stdout.readline() == "held\n"
        yield holder
    finally:
        holder.kill()
        holder.communicate()


def ask(holder: subprocess.Popen[str]) -> str:
    assert holder.stdin and holder.stdout
    holder.stdin.write("?\n")
    holder.stdin.flush()
    return holder.stdout.readline()


@pytest.mark.parametrize("machine", ["", "another"])
def test_a_second_live_run_is_refused_until_the_first_is_killed(tmp_path, machine):
    with held_by(tmp_path, machine) as holder:
        with pytest.raises(UserError, match=f"process {holder.pid} on"):
            lock.take(tmp_path)
        assert ask(holder) == "has it\n"
    assert (tmp_path / lock.LOCK).exists()  # nobody was left to remove it
    started = time.monotonic()
    lock.take(tmp_path)
    waited_s = time.monotonic() - started
    assert waited_s > lock.STALE_S if machine else waited_s < lock.STALE_S
    lock.release(tmp_path)
    assert not (tmp_path / lock.LOCK).exists()


def test_a_holder_that_finds_its_lock_taken_stops_before_its_next_write(tmp_path):
    with held_by(tmp_path, "another") as holder:
        holder.send_signal(signal.SIGSTOP)  # its host seems to be gone
        lock.take(tmp_path)
        holder.send_signal(signal.SIGCONT)
        assert ask(holder) == "lost it\n"
        time.sleep(0.3)  # it counts no more
        lock.require(tmp_path)
        lock.release(tmp_path)


def test_one_of_many_takes_a_stale_lock(tmp_path):
    with held_by(tmp_path):
        pass
    command = [sys.executable, "-c", HOLDER, str(tmp_path), ""]
    found = [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        for _ in range(3)
    ]
    lines = [each.stdout.readline() for each in found if each.stdout]
    assert sorted(lines) == [b"", b"", b"held\n"]
    for each in found:
        each.kill()
        each.communicate()


def test_to_look_never_takes_the_lock(tmp_path):
    assert not lock.is_locked(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with held_by(tmp_path):
        assert lock.is_locked(tmp_path)
    assert not lock.is_locked(tmp_path)


@pytest.mark.parametrize("text", ["", '{"host": "a", "pid": 1}'])
def test_a_lock_of_an_unknown_holder_is_stale_after_its_time(tmp_path, text):
    (tmp_path / lock.LOCK).write_text(text)
    assert lock.is_locked(tmp_path)
    lock.take(tmp_path)
    lock.release(tmp_path)
