"""The registry of trackers by their names in `logging.trackers`, and what a tracker is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from mindspeed_rlxf.config.registry import register_part

JSONL = "jsonl"
"""metrics.jsonl, which every run writes."""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told about the run.

    run_id:  the same for every start of the same run directory
    folder:  this tracker's folder in the run directory
    config:  the resolved configuration as a tree, without secrets
    resumed: iteration from which the run resumes; 0 = a new run
    offline: True = send nothing over the network; None = the tracker decides
    """

    name: str
    project: str
    run_id: str
    folder: Path
    config: Mapping[str, Any]
    resumed: int = 0
    offline: bool | None = None


class Tracker(Protocol):
    """A tracker; its exceptions become warnings."""

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Record the finite metrics of an iteration; each number is larger than all before."""

    def finish(self) -> None:
        """Write what is not yet written; called once, at the end."""


TrackerFactory: TypeAlias = Callable[[TrackedRun], Tracker]


@dataclass(frozen=True)
class Registered:
    """A registered tracker, see `register_tracker` for its fields."""

    factory: TrackerFactory
    module: str = ""
    package: str = ""
    rewinds: bool = False


TRACKERS: dict[str, Registered] = {}


def register_tracker(
    name: str, module: str = "", package: str = "", rewinds: bool = False
) -> Callable[[TrackerFactory], TrackerFactory]:
    """Return a decorator that registers a tracker class, or a function that makes a tracker.

    module:  module that must be importable, checked before the run starts
    package: its pip name, if that is another one
    rewinds: True = it drops iterations after `TrackedRun.resumed` itself, and gets them again;
             False = it gets no iteration a second time
    The decorator raises ValueError for a name that is taken.
    """

    def register(factory: TrackerFactory) -> TrackerFactory:
        if name == JSONL:
            raise ValueError(f"tracker {name!r} is the package's own; choose another name")
        registered = Registered(factory, module, package or module, rewinds)
        register_part(TRACKERS, name, registered, "tracker")
        return factory

    return register
