"""Send metrics to trackers, each in a thread of its own, so that none can delay training.

    trackers = Trackers(names, run, warn)
    trackers.log(iteration, metrics)     # returns at once
    trackers.close()

Trackers are registered by name (`register_tracker`); `tracker_packages` has the built-in ones.
"""

from __future__ import annotations

import contextlib
import importlib.util
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from mindspeed_rlxf.config.errors import Problem
from mindspeed_rlxf.config.secret_words import FORMS, SCHEME, URL_USER
from mindspeed_rlxf.config.suggest import closest
from mindspeed_rlxf.files.safe import PRIVATE, make_private_folder, open_file
from mindspeed_rlxf.reporting import tracker_packages
from mindspeed_rlxf.reporting.tracker_registry import (
    JSONL,
    TRACKERS,
    Registered,
    TrackedRun,
    Tracker,
    register_tracker,
)

__all__ = [
    "JSONL", "TRACKERS", "TrackedRun", "Tracker", "Trackers", "find_problems", "register_tracker",
    "tracker_packages",
]  # fmt: skip

KEY = "logging.trackers"
WAITING = 10_000  # iterations that a tracker may be behind; further ones are dropped
CLOSE_S = 30.0  # at the end of a run, for all trackers together
RECORDED = "recorded.txt"  # one line for each iteration that the tracker was given


def find_problems(names: Sequence[str]) -> list[Problem]:
    """Return a problem for each unknown tracker, and each whose package is not installed."""
    problems, known = [], [JSONL, *TRACKERS]
    for name in names:
        if name not in known:
            remedy = f"use {closest(name, known) or JSONL}, or add its file to training.plugins"
            problems.append(Problem(KEY, f"must be of {', '.join(known)}", name, remedy))
        elif name != JSONL and (module := TRACKERS[name].module) and not _is_installed(module):
            package = TRACKERS[name].package
            remedy = f"run `pip install {package}`, or remove it from {KEY}"
            problems.append(Problem(KEY, f"needs the package {package}", name, remedy))
    return problems


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent package
        return False


class Trackers:
    """All trackers of a run, each with a thread."""

    def __init__(
        self,
        names: Sequence[str],
        run: TrackedRun,
        warn: Callable[[str], None],
        mode: int = PRIVATE,
    ) -> None:
        """Make the folders of the trackers and start their threads.

        names:      registered, as in `logging.trackers`; `jsonl` and repeated names are left out
        run.folder: folder for all trackers; each gets a subfolder; not made without trackers
        warn:       prints a warning; called from any thread
        mode:       permission bits of the files
        """
        chosen = [name for name in dict.fromkeys(names) if name != JSONL]
        self._senders = []
        for name in chosen:
            folder = run.folder / name
            make_private_folder(run.folder, mode)
            make_private_folder(folder, mode)
            each = replace(run, folder=folder)
            self._senders.append(_Sender(name, TRACKERS[name], each, warn, mode))

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Queue the metrics of an iteration for every tracker; return at once."""
        for sender in self._senders:
            sender.put(iteration, metrics)

    def close(self) -> None:
        """End the trackers after what is queued; warn of iterations that they lost.

        Waits CLOSE_S at most, for all of them together.
        """
        deadline = time.monotonic() + CLOSE_S
        for sender in self._senders:
            sender.end()
        for sender in self._senders:
            sender.join(max(deadline - time.monotonic(), 0.0))


class _Sender:
    """One tracker and the thread that calls it."""

    def __init__(
        self,
        name: str,
        registered: Registered,
        run: TrackedRun,
        warn: Callable[[str], None],
        mode: int,
    ) -> None:
        self._name, self._registered, self._run, self._warn = name, registered, run, warn
        self._file, self._mode = run.folder / RECORDED, mode
        self._last = -1 if registered.rewinds else self._read_last()
        self.lost, self._has_warned = 0, False
        self._queue: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue()
        self._thread = threading.Thread(
            target=self._run_tracker, name=f"tracker {name}", daemon=True
        )
        self._thread.start()

    def put(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Queue an iteration's finite metrics; if WAITING are queued, count it as lost instead."""
        finite = {
            name: float(v) for name, v in metrics.items() if v == v and abs(v) != float("inf")
        }
        if self._queue.qsize() < WAITING:
            self._queue.put((iteration, finite))
        else:
            self._count_lost(f"it is {WAITING} iterations behind")

    def end(self) -> None:
        """Ask the thread to end after the queued iterations; does not wait."""
        self._queue.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end; warn if it does not in time, or if iterations were lost.

        `end` must have been called.
        """
        self._thread.join(timeout_s)
        left = max(self._queue.unfinished_tasks - 1, 0)  # without the None of `end`
        if self._thread.is_alive():
            self._warn(
                f"tracker {self._name} did not end in time, {left} iterations may be missing"
            )
        elif self.lost:
            self._warn(f"tracker {self._name} lacks {self.lost} iterations; metrics.jsonl has all")

    def _run_tracker(self) -> None:
        """Make the tracker, pass it the queued iterations and finish it; runs in the thread.

        The queue ends with None. If the tracker cannot be made, all iterations are counted as lost.
        Exceptions of the tracker, also SystemExit, go no further: they become a warning.
        """
        tracker: Tracker | None = None
        try:
            tracker = self._registered.factory(self._run)
        except BaseException as error:  # libraries raise SystemExit too
            self._count_lost(_describe_error(error), 0)
        while (item := self._queue.get()) is not None:
            self._send_iteration(tracker, *item)
            self._queue.task_done()
        if tracker is not None:
            try:
                tracker.finish()
            except BaseException as error:
                self._count_lost(_describe_error(error), 0)

    def _send_iteration(
        self, tracker: Tracker | None, iteration: int, metrics: Mapping[str, float]
    ) -> None:
        """Pass an iteration to the tracker, and append its number to the file of sent iterations.

        Does nothing for numbers up to the last one sent. A tracker that rewinds keeps no file. Any
        exception of the tracker or the file is caught, and the iteration counts as lost.
        tracker: None = it could not be made, so that the iteration is counted as lost
        """
        if iteration <= self._last:
            return
        if tracker is None:
            self._count_lost("")
            return
        try:
            tracker.log(iteration, metrics)
            self._last = iteration
            if not self._registered.rewinds:
                with open_file(self._file, "a", self._mode, encoding="ascii") as stream:
                    stream.write(f"{iteration}\n")
        except BaseException as error:
            self._count_lost(_describe_error(error))

    def _count_lost(self, why: str, count: int = 1) -> None:
        """Add `count` to the lost iterations, and print a warning with `why`.

        No warning if `why` is "", or if this has warned before.
        """
        self.lost += count
        if why and not self._has_warned:
            self._has_warned = True
            self._warn(
                f"tracker {self._name} failed: {why}; training goes on, metrics.jsonl has all"
            )

    def _read_last(self) -> int:
        """Return the highest iteration that an earlier start recorded in its file.

        -1 if it has none, or cannot be opened.
        """
        with contextlib.suppress(OSError), open_file(self._file, "r", encoding="ascii") as stream:
            numbers = [int(line) for line in stream.read().split() if line.isdigit()]
            return max(numbers, default=-1)
        return -1


def _describe_error(error: BaseException) -> str:
    """Return type and message of an error on one line of at most 300 characters.

    Forms of secrets become `***`.
    """
    text = " ".join(f"{type(error).__name__}: {error}".split())
    for form in (*FORMS, SCHEME, URL_USER):
        text = form.sub("***", text)
    return text[:300]
