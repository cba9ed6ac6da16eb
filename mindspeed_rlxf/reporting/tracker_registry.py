"""The registry of trackers, by the names in `logging.trackers`, and the facts that they get."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from mindspeed_rlxf.config.registry import add

JSONL = "jsonl"
"""metrics.jsonl, which every run writes."""


@dataclass(frozen=True)
class TrackedRun:
    """The facts about a run that a tracker gets.

    run_id:  the same for every start of the same run directory
    folder:  this tracker's folder in the run directory
    config:  the resolved configuration as a tree, without secrets
    resumed: iteration from which the run resumes; 0 = a new run
    offline: keep the record on this host
    """

    name: str
    project: str
    run_id: str
    folder: Path
    config: Mapping[str, Any]
    resumed: int = 0
    offline: bool | None = None


class Tracker(Protocol):
    """A tracker, called from one thread. Its exceptions are counted; the first one is a warning."""

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Record the finite metrics of an iteration. iteration: larger than all earlier ones"""

    def finish(self) -> None:
        """Write the metrics that are not yet written."""


TrackerFactory: TypeAlias = Callable[[TrackedRun], Tracker]


@dataclass(frozen=True)
class Registered:
    """A registered tracker, see `register_tracker`.

    rewinds: False = the tracker keeps the first record of an iteration
    """

    factory: TrackerFactory
    module: str = ""
    package: str = ""
    rewinds: bool = False


TRACKERS: dict[str, Registered] = {}


def register_tracker(
    name: str, module: str = "", package: str = "", rewinds: bool = False
) -> Callable[[TrackerFactory], TrackerFactory]:
    """Decorator that registers a tracker class, or a function that makes one, under a name.

    module:  module that must be importable, checked before the run starts; package: its pip name
    rewinds: it drops iterations after `TrackedRun.resumed` itself, and may get these again
    Raises ValueError for a name that is taken.
    """

    def register(factory: TrackerFactory) -> TrackerFactory:
        if name == JSONL:
            raise ValueError(f"tracker {name!r} is the package's own; choose another name")
        add(TRACKERS, name, Registered(factory, module, package or module, rewinds), "tracker")
        return factory

    return register
