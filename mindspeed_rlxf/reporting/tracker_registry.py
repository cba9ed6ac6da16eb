"""Trackers by name of `logging.trackers`, and what they learn of a run."""

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
    """What a tracker learns about the run.

    run_id:  the same for every start of the same run directory
    folder:  of this tracker, in the run directory
    config:  the resolved configuration as a tree, without secrets
    resumed: iteration that the run goes on from; 0 = it begins
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
    """Called from one thread. Exceptions are counted, and warned of once."""

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Record the finite metrics of an iteration. iteration: larger than all before"""

    def finish(self) -> None:
        """Write what is left."""


TrackerFactory: TypeAlias = Callable[[TrackedRun], Tracker]


@dataclass(frozen=True)
class Registered:
    """module: what has to be installed; package: its name for pip; rewinds: takes back iterations
    after `resumed` by itself, others keep the first record of an iteration"""

    factory: TrackerFactory
    module: str = ""
    package: str = ""
    rewinds: bool = False


TRACKERS: dict[str, Registered] = {}


def register_tracker(
    name: str, module: str = "", package: str = "", rewinds: bool = False
) -> Callable[[TrackerFactory], TrackerFactory]:
    """Decorate a class of trackers, or a function that makes one, as a choice of the configuration.

    module:  that has to be importable, checked before the run starts; package: its name for pip
    rewinds: it removes what it has after `TrackedRun.resumed`, so that it may get these again
    Raises ValueError for a name that is taken.
    """

    def register(factory: TrackerFactory) -> TrackerFactory:
        if name == JSONL:
            raise ValueError(f"tracker {name!r} is the package's own; choose another name")
        add(TRACKERS, name, Registered(factory, module, package or module, rewinds), "tracker")
        return factory

    return register
