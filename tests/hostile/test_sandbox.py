"""The sandbox stops hostile programs."""

import ctypes
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.config.problems import UserError
from mindspeed_rlxf.config.reward_section import SandboxConfig
from mindspeed_rlxf.rewards.sandbox import Outcome, Sandbox
from tests.bubblewrap import open_sandbox
from tests.hostile.sandbox_programs import HOSTILE, PRELUDE, Hostile
from tests.hostile.sandbox_table import put_into

ROOT = Path(__file__).parents[2]
STRICT = {"cpu_s": 3.0, "wall_s": 8.0, "memory_mb": 128, "file_mb": 4, "output_kb": 64}
WORD = f"secret-{secrets.token_hex(8)}"
MARK = f"rlxf{secrets.token_hex(4)}"  # a name of a process has at most 15 letters
QUICK = {"cpu_s": 0.3, "wall_s": 0.6}
AT_ONCE = 2
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


def open_strict_sandbox(**limits: Any) -> Sandbox:
    return open_sandbox(SandboxConfig(**{**STRICT, **limits}))


Results = dict[str, Outcome]


@pytest.fixture(scope="module")
def results(host: Host, request: pytest.FixtureRequest) -> Results:
    """Outcomes of the chosen programs, some of which run at once."""
    slow, quick = open_strict_sandbox(), open_strict_sandbox(**QUICK)
    calls = [getattr(item, "callspec", None) for item in request.session.items]
    chosen = [c.params["hostile"] for c in calls if c is not None and "hostile" in c.params]

    def run(hostile: Hostile) -> Outcome:
        program = PRELUDE + hostile.program
        for name, value in host.names(os.getpid()).items():
            program = program.replace(name, value)
        return (quick if hostile.takes_time else slow).run(program, "input\n")

    slow.run(KEEP)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip([each.name for each in chosen], pool.map(run, chosen), strict=True))


@pytest.mark.parametrize("hostile", HOSTILE, ids=[hostile.name for hostile in HOSTILE])
def test_a_hostile_program_is_stopped(results: Results, hostile: Hostile) -> None:
    outcome = results[hostile.name]
    assert "HARM" not in outcome.stdout and WORD not in outcome.stdout + outcome.stderr
    assert outcome.cause in hostile.causes or "stopped:" in outcome.stdout, outcome
    assert outcome.cause in (*hostile.causes, "ok"), outcome


def test_nothing_is_left_of_hostile_programs(host: Host, results: Results) -> None:
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
    sandbox = open_strict_sandbox()
    with ThreadPoolExecutor(1) as pool:
        program = PRELUDE.replace("@MARK@", f"{MARK}x") + "mark()\ntime.sleep(1)"
        running = pool.submit(sandbox.run, program)
        seen: list[int] = []
        while not running.done() and not seen:
            seen = processes_named(f"{MARK}x")
        assert seen and running.result().cause == "ok"
    assert processes_named(f"{MARK}x") == []


SCORES = """
import sys
from mindspeed_rlxf.config.reward_section import SandboxConfig
from mindspeed_rlxf.rewards.sandbox import Sandbox
Sandbox.choose(SandboxConfig()).run(sys.argv[1])
"""


def test_programs_end_with_the_process_that_scores() -> None:
    """It is killed while a program with two processes runs; nothing is left of it."""
    open_strict_sandbox()
    mark = f"{MARK}s"
    program = PRELUDE.replace("@MARK@", mark) + "mark()\nos.fork()\ntime.sleep(1000)"
    with subprocess.Popen([sys.executable, "-c", SCORES, program]) as scoring:
        try:
            assert wait_until(lambda: len(processes_named(mark)) == 2), "the program runs"
        finally:
            scoring.kill()
    assert wait_until(lambda: not processes_named(mark))


def wait_until(condition: Callable[[], bool]) -> bool:
    """Wait 60 s at most for a condition. Returns whether it came true."""
    deadline = time.monotonic() + 60
    while not (true := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return true


@pytest.mark.parametrize("program", ["#!/bin/sh\necho No permissions >&2\nexit 1\n", None])
def test_without_bubblewrap_programs_are_refused_with_the_reason_unless_it_is_unsafe(
    host: Host, monkeypatch: pytest.MonkeyPatch, program: str | None
) -> None:
    """A bubblewrap that may make no namespaces counts as none, as in many containers."""
    folder = host.home / "bin"  # where another user may run programs
    folder.mkdir(exist_ok=True)
    (folder / "bwrap").unlink(missing_ok=True)
    if program is not None:
        (folder / "bwrap").write_text(program)
        (folder / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(UserError, match="No permissions" if program else "is not installed"):
        Sandbox.choose(SandboxConfig())
    sandbox = Sandbox.choose(SandboxConfig(unsafe=True, **{**STRICT, "memory_mb": 64}))
    assert "WITHOUT isolation" in sandbox.describe()
    assert sandbox.run("print(input())", "hi\n").stdout == "hi\n"
    assert sandbox.run("import time; x = b'x' * (100 << 20); time.sleep(9)").cause == "memory"
    assert sandbox.run("import os\nos.fork()\nwhile True: pass", wall_s=0.5).cause == "wall_time"


def test_the_table_in_the_document_is_made_of_these_programs() -> None:
    assert len(HOSTILE) >= 40 and len({hostile.name for hostile in HOSTILE}) == len(HOSTILE)
    text = (ROOT / "docs" / "data_and_rewards.md").read_text(encoding="utf-8")
    assert put_into(text) == text, "run python -m tests.hostile.sandbox_table"
