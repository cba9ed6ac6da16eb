"""Start one scoring process, exchange messages with it, read its output and end it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from typing import Any

import psutil

from mindspeed_rlxf.files.plain import parse_json

MAX_OUTPUT = 2**20  # bytes that the scoring of a sample may print, or return
MAX_SHOWN = 1000  # printed bytes that are logged
SEND_S = 10.0  # longest wait until the process accepts a sample, and until it is dead
EXIT_S = 0.3  # wait for a process that is about to end by itself
READ = 2**16


class TooMuchOutput(Exception):
    """A process printed or returned more than MAX_OUTPUT bytes."""


class ScoringProcess:
    """A process that runs `child`. On Linux it is killed when the thread that made it ends.

    is_ready:     set by the caller after the first message
    output_ended: the process has closed its output
    """

    def __init__(self, plan: dict[str, Any], memory: int) -> None:
        self.channel, theirs = socket.socketpair()
        self.channel.setblocking(False)
        command = [sys.executable, "-m", "mindspeed_rlxf.rewards.child", str(theirs.fileno())]
        with theirs, tempfile.TemporaryFile() as file:  # the plan may exceed a socket's buffer
            file.write(json.dumps(plan, default=str).encode())
            file.seek(0)
            self._process = subprocess.Popen(
                [*command, str(os.getpid()), str(memory)],
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=_make_environment(),
            )
        assert self._process.stdout is not None
        self.output = self._process.stdout
        os.set_blocking(self.output.fileno(), False)
        self.is_ready = self.output_ended = False
        self._received = bytearray()
        self._shown = bytearray()
        self._printed = 0

    def give(self, sample: dict[str, Any]) -> None:
        """Send a sample to score, and count the process's output anew.

        Values that JSON lacks are sent as `str` gives them. May wait for the process to read.
        Raises OSError if it has closed the socket, or does not read the sample within SEND_S.
        """
        self._printed = 0
        self.channel.settimeout(SEND_S)
        self.channel.sendall(json.dumps(sample, default=str).encode() + b"\n")
        self.channel.setblocking(False)

    def receive(self) -> Any:
        """Return the next message, parsed from JSON; None if none is complete yet. Never waits.

        Reads the socket once, at most READ bytes. Raises EOFError where the process closed the
        socket or sent a line that is no JSON, and TooMuchOutput for an incomplete message of more
        than MAX_OUTPUT bytes.
        """
        try:
            received = self.channel.recv(READ)
        except BlockingIOError:
            return None
        except OSError as error:
            raise EOFError from error
        if not received:
            raise EOFError
        self._received += received
        if b"\n" not in received:
            if len(self._received) > MAX_OUTPUT:
                raise TooMuchOutput(f"its result has more than {MAX_OUTPUT} bytes")
            return None
        line, _, rest = bytes(self._received).partition(b"\n")
        self._received = bytearray(rest)
        try:
            return parse_json(line)
        except ValueError as error:
            raise EOFError(f"it wrote {line[:60]!r} to the channel of the run") from error

    def read_output(self) -> None:
        """Read what the process has printed, without waiting; keep the first MAX_SHOWN bytes.

        `take_printed` returns and clears the kept bytes. Sets `output_ended` at the end of the
        output. Raises TooMuchOutput if over MAX_OUTPUT were printed for a sample, or at the start.
        """
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.output.fileno(), READ):
                self._printed += len(chunk)
                self._shown += chunk[: MAX_SHOWN - len(self._shown)]
                if self._printed > MAX_OUTPUT:
                    raise TooMuchOutput(f"it printed more than {MAX_OUTPUT} bytes")
            self.output_ended = True

    def take_printed(self) -> str:
        """Return the start of what was printed since the last call, "" for nothing; clear it.

        Without white space at its end.
        """
        text = self._shown.decode("utf-8", "backslashreplace").rstrip()
        self._shown.clear()
        return text

    def end(self, ends_itself: bool = False) -> str:
        """Kill the process and its descendants; return a text on how the process had ended.

        If it still runs, all descendants are killed. If it has ended already, only the rest of its
        process group is. Waits for the process, but not for killed descendants. Closes socket and
        output. If the process still ran, the text says that it closed the socket.
        Raises subprocess.TimeoutExpired if the killed process does not end within SEND_S.
        ends_itself: first wait up to EXIT_S, because the process closed the socket and is about to
                     end
        """
        if ends_itself:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(EXIT_S)
        code = self._process.poll()
        descendants = self._stop_descendants() if code is None else []
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for descendant in descendants:
            with contextlib.suppress(psutil.Error):
                descendant.kill()
        self._process.wait(SEND_S)
        self.channel.close()
        self.output.close()
        if code is None:
            return "it closed the channel of the run"
        return f"its process ended with exit code {code}" if code >= 0 else _describe_signal(-code)

    def _stop_descendants(self) -> list[psutil.Process]:
        """Suspend the process, so that it starts no more children, and return its descendants.

        The descendants, also those in other sessions, are not suspended. [] where the process has
        ended.
        """
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(self._process.pid)
            root.suspend()
            return root.children(recursive=True)
        return []


def _describe_signal(number: int) -> str:
    with contextlib.suppress(ValueError):
        return f"its process ended by {signal.Signals(number).name}"
    return f"its process ended by signal {number}"


def _make_environment() -> dict[str, str]:
    """Return the environment of a scoring process.

    It is this process's, with sys.path as PYTHONPATH and OMP_NUM_THREADS=1 unless it is set.
    """
    path = os.pathsep.join(filter(None, sys.path))
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path}
