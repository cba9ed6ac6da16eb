"""Choose the strongest level of isolation that works on this host, and run programs at it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import mindspeed_rlxf
from mindspeed_rlxf.config.enums import SandboxLevel
from mindspeed_rlxf.config.errors import Problem, UserError
from mindspeed_rlxf.config.sandbox import SandboxConfig
from mindspeed_rlxf.rewards.outcome import ScoringBroken
from mindspeed_rlxf.rewards.sandbox.levels import PREVENTS, describe
from mindspeed_rlxf.rewards.sandbox.limits import Limits

START = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from mindspeed_rlxf.rewards.sandbox.warden import main; sys.exit(main())"
)
# A harmless program to test a level; it prints what it can reach.
_PROBE = """
import json, os, socket
def refused(attempt, *arguments):
    try:
        attempt(*arguments)
    except OSError:
        return True
    return False
print(json.dumps({
    "input": input(),
    "no socket": refused(socket.socket),
    "no host files": refused(os.stat, "/etc/passwd") and refused(os.listdir, "/proc"),
    "no writing": refused(open, "/box/x", "w"),
    "not root": os.getuid() != 0,
}))
"""
EXTRA_S = 120.0
"""Seconds to wait beyond a program's own: start of warden, copy of Python, end of processes."""
_SEEN = ("no socket", "no host files", "no writing", "not root")


class SandboxError(ScoringBroken):
    """The sandbox itself failed, not the program."""


@dataclass(frozen=True)
class Outcome:
    """The result of running a program.

    stdout: standard output, at most reward.sandbox.output_kb of it
    exit:   exit code, or 128 + number of the signal that ended the program
    cause:  "ok", "error" (an exit code other than 0), "killed" (by a signal), or the limit that was
            exceeded: "cpu_time", "wall_time", "memory", "output", "files", "processes"
    stderr: beginning of standard error, for messages
    """

    stdout: str
    exit: int
    cause: str
    stderr: str = ""


class Sandbox:
    """Runs programs one after the other, each isolated from the host and from the other programs.

    A separate process, the warden, starts them. It is started with the first program and replaced
    when it is lost. It ends with `close` or when this process ends.
    """

    def __init__(
        self, level: SandboxLevel, python: str, limits: Limits, packages: bool = False
    ) -> None:
        self.level, self.python, self.limits, self.packages = level, python, limits, packages
        self._lock = threading.Lock()
        self._warden: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()

    @classmethod
    def choose(cls, config: SandboxConfig) -> Sandbox:
        """Return a sandbox of the strongest level that works here, or of `config.level`.

        Tries each level with `config.python`, or else with each interpreter found. A level works
        when `probe` finds no fault; its warden keeps running. Raises UserError, with the reason of
        each, if none works; the level `limits` is tried only with `reward.sandbox.weak`.
        """
        limits = limits_of(config)
        reasons = []
        for level in _list_levels(config):
            for python in [config.python] if config.python else _list_interpreters():
                sandbox = cls(level, python, limits, packages=config.python is not None)
                if not (reason := sandbox.probe()):
                    return sandbox
                sandbox.close()
                reasons.append(f"{level.value} with {python}: {reason}")
        raise UserError(_no_level(config, reasons))

    def probe(self) -> str:
        """Run a harmless program; return why the level does not work or isolate, "" if it does.

        Isolation is not checked for the level `limits`.
        """
        try:
            outcome = self._ask_warden(_PROBE, "mild\n")
        except SandboxError as error:
            return str(error)
        if outcome.cause != "ok":
            last = outcome.stderr.strip().rpartition("\n")[2]
            return f"a harmless program ends with {outcome.cause}, exit code {outcome.exit}: {last}"
        try:
            seen = json.loads(outcome.stdout)
        except ValueError:
            return f"a harmless program prints {outcome.stdout!r:.80}"
        wanted = () if self.level is SandboxLevel.LIMITS else _SEEN
        missing = [name for name in wanted if not seen[name]]
        return f"isolation is not complete: {', '.join(missing)}" if missing else ""

    def run(self, program: str, stdin: str = "", wall_s: float | None = None) -> Outcome:
        """Run a Python program until it ends or exceeds a limit; remove its processes and files.

        If the sandbox fails, or bubblewrap reports an error, a harmless program is run (`probe`),
        and SandboxError raised if that fails too. If it works, `program` caused the failure: its
        outcome is "killed" in the first case, and unchanged in the second.

        program: source code
        wall_s:  time limit in seconds, at most reward.sandbox.wall_s; None = that
        """
        try:
            outcome = self._ask_warden(program, stdin, wall_s)
        except SandboxError as error:
            if reason := self.probe():
                raise SandboxError(f"level {self.level.value} no longer works: {reason}") from error
            return Outcome("", 128 + 9, "killed")
        by_bwrap = self.level is SandboxLevel.BUBBLEWRAP and outcome.stderr.startswith("bwrap:")
        if by_bwrap and (reason := self.probe()):
            raise SandboxError(f"level {self.level.value} no longer works: {reason}")
        return outcome

    def describe(self) -> str:
        """Return a line for the log: the level, and any threats that it does not prevent."""
        return describe(self.level)

    def close(self) -> None:
        """End the warden and the program that it runs; wait for the warden, kill it after 30 s.

        Does nothing if no warden runs, or in a fork of the process that started it. A later `run`
        starts another warden.
        """
        warden, self._warden = self._warden, None
        if warden is None or self._owner != os.getpid():
            return
        assert warden.stdin is not None and warden.stdout is not None
        with contextlib.suppress(OSError):  # of what was not sent yet
            warden.stdin.close()
        try:
            warden.wait(30)
        except subprocess.TimeoutExpired:
            warden.kill()
            warden.wait()
        warden.stdout.close()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _ask_warden(self, program: str, stdin: str, wall_s: float | None = None) -> Outcome:
        """Let the warden run a program; start the warden if needed. Does not retry.

        Raises SandboxError when the warden was lost or does not answer in time (it is ended then),
        or reports a failure.
        """
        seconds = min(self.limits.wall_s, wall_s or self.limits.wall_s)
        with self._lock:
            try:
                answer = self._exchange_lines(
                    {"program": program, "stdin": stdin, "wall_s": seconds}
                )
            except (OSError, ValueError) as error:  # an end in the middle of a line
                self.close()
                raise SandboxError(f"the process that runs programs was lost: {error}") from error
        if "failed" in answer:
            raise SandboxError(answer["failed"])
        return Outcome(**answer)

    def _exchange_lines(self, request: dict[str, object]) -> dict[str, Any]:
        if self._warden is None or self._owner != os.getpid():  # another pid: this is a fork
            self._warden, self._owner = self._start(), os.getpid()
            ready = self._send({
                "level": self.level.value, "python": self.python, "packages": self.packages,
                "limits": asdict(self.limits),
            })  # fmt: skip
            if "failed" in ready:
                self.close()
                return ready
        return self._send(request)

    def _start(self) -> subprocess.Popen[bytes]:
        root = str(Path(mindspeed_rlxf.__file__).parents[1])
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", START, root],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={name: os.environ[name] for name in ("PATH", "TMPDIR") if name in os.environ},
            start_new_session=True,
        )

    def _send(self, line: dict[str, object]) -> dict[str, Any]:
        assert self._warden is not None
        assert self._warden.stdin is not None and self._warden.stdout is not None
        self._warden.stdin.write(json.dumps(line).encode() + b"\n")
        self._warden.stdin.flush()
        answers = select.poll()
        answers.register(self._warden.stdout, select.POLLIN)
        wait_s = self.limits.wall_s + EXTRA_S
        if not answers.poll(wait_s * 1000):
            self._warden.kill()
            raise OSError(f"no answer within {wait_s:g} s")
        answer: dict[str, Any] = json.loads(self._warden.stdout.readline() or "")
        return answer


def limits_of(config: SandboxConfig) -> Limits:
    """Return the limits that a configuration sets."""
    return Limits(**{name: getattr(config, name) for name in Limits.__dataclass_fields__})


def _list_levels(config: SandboxConfig) -> list[SandboxLevel]:
    """List the levels to try: `config.level`, or with `auto` all levels, the strongest first.

    Without `config.weak` the level `limits` is left out, also if `config.level` asks for it.
    """
    asked = [config.level] if config.level is not SandboxLevel.AUTO else list(PREVENTS)
    return [level for level in asked if config.weak or level is not SandboxLevel.LIMITS]


def _list_interpreters() -> list[str]:
    """Return the interpreters to try: this environment's base one, and the system's `python3`.

    As paths without links; one path if both are the same, or the system has none.
    """
    own = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    system = shutil.which("python3", path="/usr/bin:/bin:/usr/local/bin")
    return list(dict.fromkeys([own, os.path.realpath(system)] if system else [own]))


def _no_level(config: SandboxConfig, reasons: list[str]) -> Problem:
    tried = "; ".join(reasons) or "limits alone need reward.sandbox.weak=true"
    return Problem(
        "reward.sandbox.level",
        f"must be a level of isolation that works on this host ({tried})",
        config.level.value,
        "install bubblewrap, allow user namespaces, name an interpreter that others may read as "
        "reward.sandbox.python, or accept limits alone by reward.sandbox.weak=true",
    )
