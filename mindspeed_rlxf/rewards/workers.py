"""A pool of scoring processes, which may be killed: samples go in, futures of outcomes come out.

A thread owns one process and its socket, so a killed one leaves nothing that others use.
"""

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from queue import SimpleQueue
from typing import Any

import psutil

from mindspeed_rlxf.rewards.outcome import Cause, Outcome, Sample, ScoreFailure, ScoringBroken
from mindspeed_rlxf.rewards.rules import RewardResult
from mindspeed_rlxf.rewards.scoring import MAX_OUTPUT, Plan, main

START_S = 180.0  # for the imports of the user's files
EXIT_S, END_S = 0.3, 30.0  # to end after the socket was closed, to end once killed
MAX_SHOWN = 1000  # printed bytes that are logged
CLOSED = "the pool of scoring processes was closed"
FATAL = (Cause.TIMEOUT, Cause.EXIT, Cause.MEMORY, Cause.OUTPUT)  # they end the process


class WorkerPool:
    """Scores samples in at most `size` processes, which are started when they are needed."""

    def __init__(self, plan: Plan, size: int, timeout_s: float, memory: int) -> None:
        """timeout_s: for one sample, without its wait for a process; memory: address space."""
        closing, self._close = Pipe(duplex=False)
        self._shared = _Shared(plan, timeout_s, memory, closing)
        self._size, self._threads = size, list[threading.Thread]()
        self._end = weakref.finalize(self, _end, self._shared, self._close, self._threads)

    def submit(self, sample: Sample) -> Future[Outcome]:
        """Queue a sample; its future raises ScoringBroken if no sample can be scored."""
        if not self._end.alive:
            raise ScoringBroken(CLOSED)
        future: Future[Outcome] = Future()
        self._shared.tasks.put((sample, future))
        if len(self._threads) < self._size:
            self._threads.append(threading.Thread(target=_work, args=[self._shared], daemon=True))
            self._threads[-1].start()
        return future

    def close(self) -> None:
        """Kill all processes and their descendants; futures that are not done fail."""
        self._end()


@dataclass
class _Shared:
    """What threads share; they do not have the pool, so that a forgotten one is closed."""

    plan: Plan
    timeout_s: float
    memory: int
    closing: Connection  # readable when the pool is closed
    tasks: SimpleQueue[tuple[Sample, Future[Outcome]] | None] = field(default_factory=SimpleQueue)
    to_show: threading.Lock = field(default_factory=threading.Lock)  # free: the sandbox's line
    broken: str = ""  # why no further sample is scored


def _end(shared: _Shared, close: Connection, threads: list[threading.Thread]) -> None:
    shared.broken = shared.broken or CLOSED
    close.close()
    shared.tasks.put(None)
    for thread in threads:
        thread.join(END_S)
    shared.closing.close()


def _work(shared: _Shared) -> None:
    """Score samples of the queue until it has None, which is left for the other threads."""
    process: _Process | None = None
    while (task := shared.tasks.get()) is not None:
        outcome, broken = Outcome(None), ""
        try:
            if process is not None and process.popen.poll() is not None:
                process.end()  # it was killed while idle
                process = None
            if process is None and not shared.broken:
                process = _Process(shared)
                line = process.ask(pickle.dumps(shared.plan), START_S)["sandbox"]
                process.is_ready = True
                if line and shared.to_show.acquire(blocking=False):
                    print(line, flush=True)
            if process is None or shared.broken:
                raise ScoringBroken(shared.broken)
            data = json.dumps(asdict(task[0]), default=str).encode()
            reply = process.ask(data, shared.timeout_s)
            if "cause" in reply:
                raise ScoreFailure(Cause(reply["cause"]), reply["message"])
            outcome = Outcome(RewardResult(reply["score"], reply["parts"]))
        except ScoreFailure as failure:
            outcome = Outcome(None, failure.cause, failure.message)
            if process is not None and not process.is_ready:
                broken = f"a scoring process did not start: {failure}"
        except Exception as error:  # also a sample that cannot be sent
            broken = str(error) or repr(error)
        if process is not None and process.printed:
            text = process.printed.decode(errors="backslashreplace").rstrip()
            print(f"a reward function printed: {text}", file=sys.stderr, flush=True)
            process.printed.clear()
        if process is not None and (broken or outcome.cause in FATAL):
            process.end()
            process = None
        if broken:
            shared.broken = shared.broken or broken
            task[1].set_exception(ScoringBroken(broken))
        else:
            task[1].set_result(outcome)
    shared.tasks.put(None)
    if process is not None:
        process.end()


class _Process:
    """A process that runs `scorer.main`; on Linux it ends with the thread that made it."""

    def __init__(self, shared: _Shared) -> None:
        self.channel, theirs = Pipe()
        self.closing, self.printed, self.is_ready = shared.closing, bytearray(), False
        numbers = map(str, (theirs.fileno(), os.getpid(), shared.memory))
        path = os.pathsep.join(filter(None, sys.path))
        with theirs:
            self.popen = subprocess.Popen(
                [sys.executable, "-c", f"from {main.__module__} import main; main()", *numbers],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()], start_new_session=True,
                env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path},
            )  # fmt: skip
        assert self.popen.stdout is not None
        self.output = self.popen.stdout

    def ask(self, data: bytes, timeout_s: float) -> dict[str, Any]:
        """Send data, and return the reply; `printed` gets what is printed meanwhile."""
        sources: list[Any] = [self.closing, self.output, self.channel]
        size = 0
        try:
            self.channel.send_bytes(data)
            deadline = time.monotonic() + timeout_s
            while (left := deadline - time.monotonic()) > 0:
                ready = wait(sources, left)
                if self.closing in ready:
                    raise ScoringBroken(CLOSED)
                if self.output in ready:  # first, as it was printed before the reply
                    read = os.read(self.output.fileno(), 2**16)
                    size += len(read)
                    self.printed += read[: MAX_SHOWN - len(self.printed)]
                    if size > MAX_OUTPUT:
                        raise ScoreFailure(Cause.OUTPUT, f"it printed more than {MAX_OUTPUT} bytes")
                    if not read:
                        sources.remove(self.output)
                elif ready:
                    reply = dict(json.loads(self.channel.recv_bytes()))
                    if "error" in reply:
                        did = "cannot go on" if self.is_ready else "did not start"
                        raise ScoringBroken(f"a scoring process {did}: {reply['error']}")
                    return reply
        except (EOFError, OSError):
            raise ScoreFailure(Cause.EXIT, self.end(EXIT_S)) from None
        raise ScoreFailure(Cause.TIMEOUT, f"no score within {timeout_s:g} s")

    def end(self, wait_s: float = 0.0) -> str:
        """Kill the process and its descendants; return how it had ended within wait_s."""
        if self.channel.closed:
            return ""
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(wait_s)
        code, descendants = self.popen.poll(), list[psutil.Process]()
        with suppress(psutil.Error):
            if code is None:
                root = psutil.Process(self.popen.pid)
                root.suspend()  # so that it starts no more
                descendants = root.children(recursive=True)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        for descendant in descendants:  # those in other sessions
            with suppress(psutil.Error):
                descendant.kill()
        self.popen.wait(END_S)
        self.channel.close()
        self.output.close()
        if code is None:
            return "it closed the channel of the run"
        how = f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
        return f"its process ended {how}"
