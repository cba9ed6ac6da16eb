"""Every level of the sandbox stops the hostile programs that it promises to stop.

A program is never run at a level that does not promise to stop it.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from mindspeed_rlxf.config.enums import SandboxLevel
from mindspeed_rlxf.config.errors import UserError
from mindspeed_rlxf.config.sandbox import SandboxConfig
from mindspeed_rlxf.rewards.sandbox.levels import PREVENTS
from mindspeed_rlxf.rewards.sandbox.runner import Outcome, Sandbox
from tests.hostile.sandbox_programs import HOSTILE, PRELUDE, Hostile
from tests.hostile.sandbox_table import put_into

ROOT = Path(__file__).parents[2]
STRICT = {
    "cpu_s": 3.0,
    "wall_s": 8.0,
    "memory_mb": 128,
    "file_mb": 4,
    "output_kb": 64,
    "weak": True,
}
WORD = f"secret-{secrets.token_hex(8)}"
MARK = f"rlxf{secrets.token_hex(4)}"  # a name of a process has at most 15 letters
QUICK = {"cpu_s": 0.3, "wall_s": 0.6}
AT_ONCE = 2
STRONGEST = next(iter(PREVENTS))
KEEP = "open('/tmp/left', 'w').write('x'); open('/dev/shm/left', 'w').write('x')"


class Host:
    """What a program could harm: files, a process, sockets, shared memory and descriptors."""

    def __init__(self, stack: ExitStack) -> None:
        self.home = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp")))
        self.home.chmod(0o755)
        secret = self.home / "secret.txt"
        secret.write_text(WORD)
        (self.home / "open").mkdir()
        (self.home / "open").chmod(0o777)
        waits = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()", WORD]
        self.victim = stack.enter_context(subprocess.Popen(waits, stdin=subprocess.PIPE))
        self.server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        self.abstract.bind(f"\0{MARK}")
        self.named = stack.enter_context(socket.socket(socket.AF_UNIX))
        self.named.bind(str(self.home / "socket"))
        (self.home / "socket").chmod(0o777)
        for listener in (self.server, self.abstract, self.named):
            listener.listen()
            listener.setblocking(False)
        self.memory = Path(f"/dev/shm/{MARK}")
        self.memory.write_text(WORD)
        self.memory.chmod(0o666)
        stack.callback(self.memory.unlink)
        self.segment = secrets.randbelow(1 << 30)
        libc = ctypes.CDLL(None)
        number = libc.shmget(self.segment, 4096, 0o1666)
        stack.callback(libc.shmctl, number, 0, None)
        self.inherited = os.open(secret, os.O_RDONLY)
        stack.callback(os.close, self.inherited)
        os.set_inheritable(self.inherited, True)

    def names(self, warden: int) -> dict[str, str]:
        return {
            "@WORD@": WORD, "@MARK@": MARK, "@HOME@": str(self.home),
            "@VICTIM@": str(self.victim.pid), "@WARDEN@": str(warden),
            "@PORT@": str(self.server.getsockname()[1]), "@SEGMENT@": str(self.segment),
        }  # fmt: skip

    def harm(self) -> list[str]:
        """Say what is not as it was."""
        found = []
        if self.victim.poll() is not None:
            found.append("a process of the host was ended")
        if self.memory.read_text() != WORD or (self.home / "secret.txt").read_text() != WORD:
            found.append("a file was changed")
        if list((self.home / "open").iterdir()) or Path(f"/var/tmp/{MARK}").exists():
            found.append("a file was written")
        for listener in (self.server, self.abstract, self.named):
            try:
                listener.accept()[0].close()
                found.append("somebody connected")
            except BlockingIOError:
                pass
        return found


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLXF_SECRET_TOKEN", WORD)
        host = Host(stack)
        (host.home / "tmp").mkdir()
        patch.setenv("TMPDIR", str(host.home / "tmp"))
        yield host


def open_sandbox(level: SandboxLevel) -> Sandbox:
    """A sandbox of this level; skips the test where the host does not have it."""
    try:
        return Sandbox.choose(SandboxConfig(level=level, **STRICT))
    except UserError as error:
        assert "isolation is not complete" not in str(error)
        pytest.skip(str(error))


Results = dict[str, tuple[Outcome, bool]]
"""Name of the program -> its outcome, and whether the warden was the same afterwards."""


def run_all(host: Host, level: SandboxLevel, programs: list[Hostile]) -> Results:
    """Run programs, some at once, each group in a sandbox of its own."""

    with open_sandbox(level) as chosen:
        python = chosen.python

    def run(group: int) -> Results:
        found = {}
        with ExitStack() as stack:
            limits = chosen.limits
            slow = stack.enter_context(Sandbox(level, python, limits))
            quick = stack.enter_context(Sandbox(level, python, replace(limits, **QUICK)))
            if level is not SandboxLevel.LIMITS:
                slow.run(KEEP)
            for hostile in programs[group::AT_ONCE]:
                sandbox = quick if hostile.takes_time else slow
                found[hostile.name] = run_one(host, sandbox, hostile)
        return found

    with ThreadPoolExecutor(AT_ONCE) as pool:
        parts = list(pool.map(run, range(AT_ONCE)))
    return {name: result for part in parts for name, result in part.items()}


def run_one(host: Host, sandbox: Sandbox, hostile: Hostile) -> tuple[Outcome, bool]:
    if sandbox._warden is None:
        sandbox.run("pass")
    assert sandbox._warden is not None
    before = sandbox._warden.pid
    program = PRELUDE + hostile.program
    for name, value in host.names(before).items():
        program = program.replace(name, value)
    assert hostile.threat in PREVENTS[sandbox.level], "never run what is not stopped"
    outcome = sandbox.run(program, "input\n")
    return outcome, sandbox._warden is not None and sandbox._warden.pid == before


def promised(level: SandboxLevel) -> list[Hostile]:
    return [hostile for hostile in HOSTILE if hostile.threat in PREVENTS[level]]


@pytest.fixture(scope="module")
def results(host: Host, request: pytest.FixtureRequest) -> Callable[[SandboxLevel], Results]:
    """Outcomes of a level, whose chosen programs run together when the first one is asked for."""
    found: dict[SandboxLevel, Results] = {}
    absent: dict[SandboxLevel, str] = {}
    calls = [getattr(item, "callspec", None) for item in request.session.items]
    wanted = [call.params for call in calls if call is not None and "hostile" in call.params]

    def get(level: SandboxLevel) -> Results:
        if level in absent:
            pytest.skip(absent[level])
        if level not in found:
            chosen = [params["hostile"] for params in wanted if params["level"] is level]
            try:
                found[level] = run_all(host, level, chosen)
            except pytest.skip.Exception as skipped:
                absent[level] = str(skipped)
                raise
        return found[level]

    return get


@pytest.mark.parametrize(
    ("level", "hostile"),
    [
        pytest.param(
            level,
            hostile,
            id=f"{level.value}: {hostile.name}",
            marks=pytest.mark.long if hostile.takes_time and level is not STRONGEST else (),
        )
        for level in PREVENTS
        for hostile in promised(level)
    ],
)
def test_a_hostile_program_is_stopped(
    host: Host,
    results: Callable[[SandboxLevel], Results],
    level: SandboxLevel,
    hostile: Hostile,
) -> None:
    outcome, same_warden = results(level)[hostile.name]
    assert "HARM" not in outcome.stdout and WORD not in outcome.stdout + outcome.stderr
    assert outcome.cause in hostile.causes or "stopped:" in outcome.stdout, outcome
    assert outcome.cause in (*hostile.causes, "ok"), outcome
    assert same_warden, "the process that watches was ended"


@pytest.mark.parametrize("level", PREVENTS)
def test_nothing_is_left_of_hostile_programs(
    host: Host, results: Callable[[SandboxLevel], Results], level: SandboxLevel
) -> None:
    results(level)
    assert host.harm() == []
    assert processes_named(MARK) == []
    assert list((host.home / "tmp").iterdir()) == []


def processes_named(name: str) -> list[int]:
    """Processes that took a name, wherever they are in the tree."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "comm").read_text().strip() == name:
                found.append(int(folder.name))
        except OSError:  # ended meanwhile
            continue
    return found


def test_a_running_program_is_found_by_its_process_name(host: Host) -> None:
    """The check above would see a process that stays: here one is looked at while it runs."""
    with open_sandbox(STRONGEST) as sandbox, ThreadPoolExecutor(1) as pool:
        program = PRELUDE.replace("@MARK@", f"{MARK}x") + "mark()\ntime.sleep(1)"
        running = pool.submit(sandbox.run, program)
        seen: list[int] = []
        while not running.done() and not seen:
            seen = processes_named(f"{MARK}x")
        assert seen and running.result().cause == "ok"
    assert processes_named(f"{MARK}x") == []


SCORES = """
import sys
from mindspeed_rlxf.config.enums import SandboxLevel
from mindspeed_rlxf.config.sandbox import SandboxConfig
from mindspeed_rlxf.rewards.sandbox.runner import Sandbox
sandbox = Sandbox.choose(SandboxConfig(level=SandboxLevel(sys.argv[1])))
sandbox.run("pass")
print(sandbox._warden.pid, flush=True)
sandbox.run(sys.argv[2])
"""
ISOLATED = [level for level in PREVENTS if level is not SandboxLevel.LIMITS]


def end_while_it_runs(level: SandboxLevel, mark: str, whom: str) -> list[int]:
    """End the process that scores, or the warden, by SIGKILL while a program runs.

    Returns what is left of the program 5 s later, at most.
    """
    open_sandbox(level).close()
    program = PRELUDE.replace("@MARK@", mark) + "mark()\nos.fork()\ntime.sleep(1000)"
    command = [sys.executable, "-c", SCORES, level.value, program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as scoring:
        assert scoring.stdout is not None
        warden = int(scoring.stdout.readline())
        try:
            assert wait_until(lambda: len(processes_named(mark)) == 2), "the program runs"
            os.kill(scoring.pid if whom == "scoring" else warden, signal.SIGKILL)
            wait_until(lambda: not processes_named(mark))
        finally:
            scoring.kill()
    return processes_named(mark)


def wait_until(condition: Callable[[], bool]) -> bool:
    """Wait 5 s at most for a condition. Returns whether it came true."""
    deadline = time.monotonic() + 5
    while not (true := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return true


@pytest.mark.long
@pytest.mark.parametrize("level", ISOLATED)
def test_programs_end_with_the_process_that_scores(level: SandboxLevel) -> None:
    assert end_while_it_runs(level, f"{MARK}s", "scoring") == []


@pytest.mark.long
@pytest.mark.parametrize("level", [SandboxLevel.BUBBLEWRAP, SandboxLevel.NAMESPACES])
def test_programs_end_with_the_warden(level: SandboxLevel) -> None:
    assert end_while_it_runs(level, f"{MARK}w", "warden") == []


def test_the_table_in_the_document_is_made_of_these_programs() -> None:
    assert len(HOSTILE) >= 40 and len({hostile.name for hostile in HOSTILE}) == len(HOSTILE)
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    assert put_into(text) == text, "run python -m tests.hostile.sandbox_table docs/security.md"
