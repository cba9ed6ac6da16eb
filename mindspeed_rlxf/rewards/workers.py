"""A pool of scoring processes, which may be killed: samples go in, futures of outcomes come out.

One thread starts the processes, sends them samples, and kills those that exceed a deadline or fail.
A process scores one sample at a time, so that a failure concerns one sample only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import selectors
import sys
import threading
import time
import weakref
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeAlias

from mindspeed_rlxf.rewards.outcome import Cause, Outcome, Sample, ScoringBroken
from mindspeed_rlxf.rewards.processes import ScoringProcess, TooMuchOutput
from mindspeed_rlxf.rewards.rules import RewardResult
from mindspeed_rlxf.rewards.scorer import Plan

START_S = 180.0  # for the imports of the user's files
END_S = 30.0
IDLE_S = 60.0  # between two checks of an idle pool

Task: TypeAlias = tuple[Sample, "Future[Outcome]"]


@dataclass
class _Worker:
    """A process of the pool.

    deadline: time.monotonic() until which it must have scored its sample, or be ready
    task:     sample that it scores; None while it starts and while it is idle
    """

    process: ScoringProcess
    deadline: float
    task: Task | None = None

    @property
    def is_idle(self) -> bool:
        return self.process.is_ready and self.task is None


class WorkerPool:
    """Scores samples in separate processes, which are started when they are needed.

    size:      processes at the same time
    timeout_s: longest time for one sample, without its wait for a process
    memory:    bytes of address space of a process
    """

    def __init__(self, plan: Plan, size: int, timeout_s: float, memory: int) -> None:
        self._loop = _Loop(plan, size, timeout_s, memory)
        self._end = weakref.finalize(self, self._loop.close)

    def submit(self, sample: Sample) -> Future[Outcome]:
        """Queue a sample to be scored, and return its future at once.

        The future has a failed outcome if the sample failed, and raises ScoringBroken if the
        processes do not work. Raises ScoringBroken if the pool is closed.
        """
        return self._loop.submit(sample)

    def close(self) -> None:
        """Kill all processes and their descendants; wait for it up to END_S.

        Futures that are not done raise ScoringBroken.
        """
        self._end()


class _Loop:
    """The thread of a pool. It has no reference to the pool, so that an unused pool is closed."""

    def __init__(self, plan: Plan, size: int, timeout_s: float, memory: int) -> None:
        self._plan, self._size = dataclasses.asdict(plan), size
        self._timeout_s, self._memory = timeout_s, memory
        self._waiting: deque[Task] = deque()
        self._workers: list[_Worker] = []
        self._lock, self._closing = threading.Lock(), False
        self._broken = self._shown = ""
        self._selector = selectors.DefaultSelector()
        self._wakes, self._wake = os.pipe()
        os.set_blocking(self._wakes, False)
        os.set_blocking(self._wake, False)
        self._selector.register(self._wakes, selectors.EVENT_READ)
        self._thread: threading.Thread | None = None

    def submit(self, sample: Sample) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        with self._lock:
            if self._closing:
                raise ScoringBroken(self._broken or "the pool of scoring processes is closed")
            self._waiting.append((sample, future))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rewards", daemon=True)
                self._thread.start()
            self._wake_thread()
        return future

    def close(self) -> None:
        with self._lock:
            self._closing = True
            self._wake_thread()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(END_S)
        with self._lock:
            self._close_pipe()

    def _close_pipe(self) -> None:
        """Close the pipe that wakes the thread, and the selector.

        Does nothing if they are closed, or while the thread runs.
        """
        if self._wake >= 0 and (self._thread is None or not self._thread.is_alive()):
            os.close(self._wakes)
            os.close(self._wake)
            self._selector.close()
            self._wake = -1

    def _wake_thread(self) -> None:
        """Wake the thread by a byte in its pipe, unless that is closed. Call with the lock held."""
        if self._wake < 0:
            return
        with contextlib.suppress(BlockingIOError):  # the pipe is full, so the thread wakes anyway
            os.write(self._wake, b"x")

    def _run(self) -> None:
        try:
            while not self._closing:
                self._hand_out()
                self._wait_and_handle()
                self._keep_deadlines()
        except Exception as error:
            self._broken = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._end_all(self._broken or "the pool of scoring processes was closed")

    def _end_all(self, reason: str) -> None:
        with self._lock:
            self._closing = True
        for worker in list(self._workers):
            self._remove_process(worker)
            if worker.task is not None:
                worker.task[1].set_exception(ScoringBroken(reason))
        self._fail_waiting(reason)

    def _hand_out(self) -> None:
        """Send waiting samples to idle processes, and start processes for the rest, up to `size`.

        The oldest sample is sent first. May wait up to SEND_S for each process to read its sample.
        A sample fails if its process cannot be written to. In a broken pool, all waiting samples
        fail.
        """
        if self._broken:
            self._fail_waiting(self._broken)
        for worker in [worker for worker in self._workers if worker.is_idle]:
            if not (task := self._pop_task()):
                return
            worker.task, worker.deadline = task, time.monotonic() + self._timeout_s
            try:
                worker.process.give(dataclasses.asdict(task[0]))
            except OSError:
                self._finish(worker, Outcome(None, Cause.EXIT, self._remove_process(worker)))
        starting = sum(not worker.process.is_ready for worker in self._workers)
        while len(self._workers) < self._size and starting < len(self._waiting):
            self._start_process()
            starting += 1

    def _pop_task(self) -> Task | None:
        with self._lock:
            return self._waiting.popleft() if self._waiting else None

    def _start_process(self) -> None:
        process = ScoringProcess(self._plan, self._memory)
        worker = _Worker(process, time.monotonic() + START_S)
        self._workers.append(worker)
        for file in (process.channel, process.output):
            self._selector.register(file, selectors.EVENT_READ, worker)

    def _wait_and_handle(self) -> None:
        """Wait for messages, output, a new sample or the next deadline; handle messages and output.

        Waits at most IDLE_S where no process scores or starts.
        """
        due = [w.deadline for w in self._workers if not w.is_idle]
        delay = min(due, default=time.monotonic() + IDLE_S) - time.monotonic()
        for key, _ in self._selector.select(max(delay, 0.0)):
            worker: _Worker | None = key.data
            if worker is None:
                _drain(self._wakes)
            elif worker in self._workers:
                self._handle(worker, key.fileobj is worker.process.output)

    def _handle(self, worker: _Worker, printed: bool) -> None:
        try:
            worker.process.read_output()
            if not printed and (message := worker.process.receive()) is not None:
                self._handle_message(worker, message)
        except TooMuchOutput as error:
            if not worker.process.is_ready:  # at import: every new process would print it too
                self._fail_pool(worker, str(error))
                return
            self._remove_process(worker)
            self._finish(worker, Outcome(None, Cause.OUTPUT, str(error)))
        except EOFError as error:
            self._fail_lost(worker, str(error))
        if printed and worker in self._workers and worker.process.output_ended:
            self._selector.unregister(worker.process.output)

    def _handle_message(self, worker: _Worker, message: Any) -> None:
        """Handle a message of a process: an error, its first message, or the outcome of its sample.

        An error breaks the pool. The first message marks the process as ready, and the level of the
        sandbox that it names is printed, once for the pool. An outcome finishes the sample; with
        Cause.MEMORY the process is removed first.
        """
        if isinstance(message, dict) and "error" in message:
            self._fail_pool(worker, str(message["error"]))
            return
        if not worker.process.is_ready:
            worker.process.is_ready = True
            self._show_once(message.get("sandbox", ""))
            return
        outcome = _to_outcome(message)
        if outcome.cause is Cause.MEMORY:  # the process ends, as its memory may still be full
            self._remove_process(worker)
        self._finish(worker, outcome)

    def _fail_pool(self, worker: _Worker, reason: str) -> None:
        """Kill a process that reported that no sample can be scored, and mark the pool as broken.

        The process's sample, if it has one, fails with ScoringBroken. Others finish theirs.
        """
        self._remove_process(worker)
        did = "cannot go on" if worker.process.is_ready else "did not start"
        self._broken = f"a scoring process {did}: {reason}"
        if worker.task is not None:
            worker.task[1].set_exception(ScoringBroken(self._broken))
            worker.task = None

    def _show_once(self, line: str) -> None:
        """Print a process's line on its sandbox, unless it is empty or was the last one printed."""
        if line and line != self._shown:
            print(line, flush=True)
            self._shown = line

    def _fail_lost(self, worker: _Worker, message: str) -> None:
        """Remove a process that ended or sent no JSON, and fail its sample with Cause.EXIT.

        If the process was not ready yet, marks the pool as broken instead; what it has printed is
        lost.
        message: what is wrong with the reply; "" = the process ended
        """
        end = self._remove_process(worker, ends_itself=not message)
        reason = message or end
        if worker.process.is_ready:
            self._finish(worker, Outcome(None, Cause.EXIT, reason))
        else:
            self._broken = f"a scoring process did not start: {reason}"

    def _keep_deadlines(self) -> None:
        now = time.monotonic()
        for worker in [w for w in self._workers if not w.is_idle and w.deadline <= now]:
            self._remove_process(worker)
            if worker.task is None:
                self._broken = f"a scoring process did not start within {START_S:g} s"
            text = f"no score within {self._timeout_s:g} s"
            self._finish(worker, Outcome(None, Cause.TIMEOUT, text))

    def _remove_process(self, worker: _Worker, ends_itself: bool = False) -> str:
        """Remove a process from the pool and kill it; return a text on how it had ended.

        ends_itself: the process is about to end, so give it time (`ScoringProcess.end`)
        """
        self._workers.remove(worker)
        for file in (worker.process.channel, worker.process.output):
            if file.fileno() in self._selector.get_map():
                self._selector.unregister(file)
        return worker.process.end(ends_itself)

    def _finish(self, worker: _Worker, outcome: Outcome) -> None:
        if shown := worker.process.take_printed():
            print(f"a reward function printed: {shown}", file=sys.stderr, flush=True)
        if worker.task is not None:
            worker.task[1].set_result(outcome)
            worker.task = None

    def _fail_waiting(self, reason: str) -> None:
        while task := self._pop_task():
            task[1].set_exception(ScoringBroken(reason))


def _to_outcome(message: Any) -> Outcome:
    try:
        if "cause" in message:
            return Outcome(None, Cause(message["cause"]), str(message["message"]))
        parts = {str(name): float(value) for name, value in message["parts"].items()}
        return Outcome(RewardResult(float(message["score"]), parts))
    except (KeyError, TypeError, ValueError, AttributeError):
        return Outcome(None, Cause.WRONG_RESULT, f"its process replied {message!r:.60}")


def _drain(descriptor: int) -> None:
    with contextlib.suppress(BlockingIOError):
        while os.read(descriptor, 4096):
            pass
