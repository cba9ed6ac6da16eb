"""A pool of killable processes: samples go in, futures with outcomes come out.

It also runs the tools of agents, and agents that are programs: calls go in, their results come out.
Each thread owns one process and its socket, so a killed one leaves nothing that others use.
"""

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Pipe
from queue import SimpleQueue
from typing import Any

import psutil

from mindspeed_rlxf.rewards.outcome import Cause, Outcome, ScoringBroken
from mindspeed_rlxf.rewards.rules import RewardResult
from mindspeed_rlxf.rewards.scoring import main as scoring_main

START_S = 180.0  # for the imports of the user's files
EXIT_S = 0.3  # to end after the socket was closed
END_S = 30.0  # to end once killed
CLOSED = "the pool of processes was closed"


def read_outcome(reply: dict[str, Any]) -> Outcome:
    """Return the outcome that a scoring process has sent."""
    if "cause" in reply:
        return Outcome(None, Cause(reply["cause"]), reply["message"], reply.get("details", ""))
    return Outcome(RewardResult(reply["score"], reply["parts"]))


class WorkerPool:
    """Scores samples in at most `size` processes, started on demand."""

    def __init__(
        self,
        plan: Any,
        size: int,
        timeout_s: float,
        memory: int,
        main: Callable[[], None] = scoring_main,
        read_reply: Callable[[dict[str, Any]], Any] = read_outcome,
    ) -> None:
        """Set up the pool; nothing starts before a task is there.

        Args:
            plan: What `main` reads first, pickled; a `Plan` for scoring.
            size: Processes at most.
            timeout_s: Time per task, without its wait for a process.
            memory: Address space of a process, bytes.
            main: A module's function that calls `scoring.serve`; runs in each process.
            read_reply: Returns a future's result from a reply.
        """
        self._shared = _Shared(plan, timeout_s, memory, main.__module__, read_reply)
        self._size = size
        self._threads: list[threading.Thread] = []
        self._end = weakref.finalize(self, _end, self._shared, self._threads)

    def submit(self, sample: Any) -> Future[Any]:
        """Queue a sample, a dataclass; its future raises ScoringBroken if none can be scored."""
        if not self._end.alive:
            raise ScoringBroken(CLOSED)
        future: Future[Any] = Future()
        self._shared.tasks.put((sample, future))
        if len(self._threads) < self._size:
            self._threads.append(threading.Thread(target=_work, args=[self._shared], daemon=True))
            self._threads[-1].start()
        return future

    def stop(self, future: Future[Any]) -> None:
        """Kill the process that works on a sample, if one does; its future ends by EXIT."""
        process = self._shared.running.get(future)
        if process is not None:
            with process.lock:  # or the sample ends now, and the next one's process is killed
                if self._shared.running.get(future) is process:
                    process.kill()

    def close(self) -> None:
        """Kill all processes and their descendants; pending futures fail."""
        self._end()


@dataclass
class _Shared:
    """What threads share; they do not hold the pool, so a forgotten pool is closed."""

    plan: Any
    timeout_s: float
    memory: int
    module: str
    read_reply: Callable[[dict[str, Any]], Any]
    tasks: SimpleQueue[tuple[Any, Future[Any]] | None] = field(default_factory=SimpleQueue)
    processes: "set[_Process]" = field(default_factory=set)
    running: "dict[Future[Any], _Process]" = field(default_factory=dict)
    broken: str = ""  # why no further sample is scored

    def check(self) -> None:
        if self.broken:
            raise ScoringBroken(self.broken)


def _end(shared: _Shared, threads: list[threading.Thread]) -> None:
    shared.broken = shared.broken or CLOSED
    shared.tasks.put(None)
    for process in list(shared.processes):
        process.kill()
    for thread in threads:
        thread.join(END_S)


def _work(shared: _Shared) -> None:
    """Score samples from the queue until it has None, which stays for the other threads."""
    process: _Process | None = None
    while True:
        task = shared.tasks.get()
        if task is None:
            break
        sample, future = task
        try:
            # Also killed while idle.
            if process is not None and (process.is_killed or process.popen.poll() is not None):
                process.end()
                process = None
            shared.check()
            process = process or _Process(shared)
            shared.running[future] = process
            if not future.set_running_or_notify_cancel():  # nobody waits for it any more
                continue
            data = json.dumps(asdict(sample), default=str).encode()
            reply = process.ask(data, shared.timeout_s)
            shared.check()
            if "error" in reply:
                raise ScoringBroken(f"a process cannot go on: {reply['error']}")
            future.set_result(shared.read_reply(reply))
        except Exception as error:  # also a sample that cannot be sent
            shared.broken = shared.broken or str(error) or repr(error)
            with suppress(InvalidStateError):  # of one that was cancelled
                future.set_exception(ScoringBroken(shared.broken))
        finally:
            if process is not None:
                with process.lock:
                    shared.running.pop(future, None)
    shared.tasks.put(None)
    if process is not None:
        process.end()


class _Process:
    """A process that runs `main`; on Linux it ends with the thread that made it.

    Attributes:
        lock: Held to kill it for what it runs, and to note that it runs that no more.
        is_killed: Whether it ends soon, if it has not yet.
    """

    def __init__(self, shared: _Shared) -> None:
        """Start it and send it the plan.

        Raises:
            ScoringBroken: It does not start.
        """
        self.lock = threading.Lock()
        self.is_killed = False
        self.channel, child_channel = Pipe()
        numbers = [str(child_channel.fileno()), str(os.getpid()), str(shared.memory)]
        path = os.pathsep.join(filter(None, sys.path))
        with child_channel:
            self.popen = subprocess.Popen(
                [sys.executable, "-c", f"from {shared.module} import main; main()", *numbers],
                stdin=subprocess.DEVNULL, stdout=2,  # beside what this process prints for its log
                pass_fds=[child_channel.fileno()], start_new_session=True,
                env={
                    "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", **os.environ,
                    "PYTHONPATH": path, "PYTHONUNBUFFERED": "1",
                },
            )  # fmt: skip
        self.processes = shared.processes
        self.processes.add(self)
        if shared.broken:  # `_end` may have looked at `processes` before
            self.end()
        reply = self.ask(pickle.dumps(shared.plan), START_S)
        failure = reply.get("error") or reply.get("message")
        if failure:
            self.end()
            raise ScoringBroken(f"a process did not start: {failure}")

    def ask(self, data: bytes, timeout_s: float) -> dict[str, Any]:
        """Send data; return the reply, or the `cause` and `message` for its end."""
        try:
            self.channel.send_bytes(data)
            if self.channel.poll(timeout_s):
                reply = dict(json.loads(self.channel.recv_bytes()))
                if reply.get("cause") == Cause.MEMORY:  # what holds it may still be there
                    self.end()
                return reply
        except (EOFError, OSError):
            with suppress(subprocess.TimeoutExpired):
                self.popen.wait(EXIT_S)
            self.end()
            code = self.popen.returncode
            by = f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
            return {"cause": Cause.EXIT, "message": f"its process ended {by}"}
        self.end()
        return {"cause": Cause.TIMEOUT, "message": f"no answer within {timeout_s:g} s"}

    def kill(self) -> None:
        """Kill the process and its descendants."""
        self.is_killed = True
        descendants: list[psutil.Process] = []
        with suppress(psutil.Error):
            if self.popen.poll() is None:
                root = psutil.Process(self.popen.pid)
                root.suspend()  # so that it starts no more
                descendants = root.children(recursive=True)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        for descendant in descendants:  # those in other sessions
            with suppress(psutil.Error):
                descendant.kill()

    def end(self) -> None:
        """Kill it, wait for its end, and close its socket."""
        if self.channel.closed:
            return
        self.kill()
        self.popen.wait(END_S)
        self.channel.close()
        self.processes.discard(self)
