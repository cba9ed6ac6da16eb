"""Send metrics to trackers; the failure of a tracker is a warning.

Trackers are registered by name (`register_tracker`); `tracker_packages` has the built-in ones.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from mindspeed_rlxf.config.errors import Problem, closest
from mindspeed_rlxf.reporting import tracker_packages
from mindspeed_rlxf.reporting.tracker_registry import (
    JSONL,
    TRACKERS,
    TrackedRun,
    Tracker,
    register_tracker,
)

__all__ = [
    "JSONL", "TRACKERS", "TrackedRun", "Tracker", "Trackers", "find_problems", "register_tracker",
    "tracker_packages",
]  # fmt: skip

KEY = "logging.trackers"
RECORDED = "recorded.txt"  # the last iteration that the tracker was given


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
    """All trackers of a run."""

    def __init__(self, names: Sequence[str], run: TrackedRun, warn: Callable[[str], None]) -> None:
        """Make the trackers, each with a folder.

        names:      registered, as in `logging.trackers`; `jsonl` and repeated names are left out
        run.folder: folder for all trackers; each gets a subfolder
        warn:       prints the first failure of each tracker
        """
        self._warn = warn
        self._trackers: dict[str, Tracker] = {}
        self._last: dict[str, int] = {}  # iteration that each tracker got in an earlier start
        self._run, self._warned = run, set[str]()
        for name in dict.fromkeys(names):
            if name == JSONL:
                continue
            folder = run.folder / name
            folder.mkdir(parents=True, exist_ok=True)
            recorded = folder / RECORDED
            if recorded.exists() and not TRACKERS[name].rewinds:
                numbers = recorded.read_text(encoding="ascii").split()
                self._last[name] = max(map(int, numbers), default=-1)
            with self._warning_of(name):
                self._trackers[name] = TRACKERS[name].factory(replace(run, folder=folder))

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Give the finite metrics of an iteration to each tracker.

        A tracker that cannot rewind gets no iteration that an earlier start gave it.
        """
        finite = {name: float(v) for name, v in metrics.items() if math.isfinite(v)}
        for name, tracker in self._trackers.items():
            if iteration > self._last.get(name, -1):
                with self._warning_of(name):
                    tracker.log(iteration, finite)
                    recorded = self._run.folder / name / RECORDED
                    recorded.write_text(str(iteration), encoding="ascii")

    def close(self) -> None:
        """Finish the trackers."""
        for name, tracker in self._trackers.items():
            with self._warning_of(name):
                tracker.finish()

    @contextmanager
    def _warning_of(self, name: str) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:  # libraries raise SystemExit too
            if name in self._warned:
                return
            self._warned.add(name)
            text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            self._warn(f"tracker {name} failed: {text}; training goes on, metrics.jsonl has all")
