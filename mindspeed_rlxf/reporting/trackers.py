"""Send metrics to experiment trackers; a failing tracker is only a warning.

`register_tracker` adds trackers by name.
"""

import importlib.util
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from mindspeed_rlxf.config.problems import Problem, closest
from mindspeed_rlxf.config.registry import add_to

KEY = "logging.trackers"
JSONL = "jsonl"  # metrics.jsonl, which every run writes
RECORDED = "recorded.txt"  # the last iteration that the tracker was given


@dataclass(frozen=True)
class TrackedRun:
    """Run metadata for a tracker.

    Attributes:
        name: run name.
        project: project name, `logging.tracker_project`.
        run_id: unchanged when the run directory is started again.
        folder: the tracker's own folder in the run directory.
        config: resolved configuration tree without secrets.
        offline: True = send nothing over the network; None = the tracker decides.
    """

    name: str
    project: str
    run_id: str
    folder: Path
    config: Mapping[str, Any]
    offline: bool | None = None


class Tracker(Protocol):
    """Interface for trackers; exceptions become warnings."""

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Record an iteration's finite metrics; iteration numbers increase."""

    def finish(self) -> None:
        """Flush pending data; called once, at the end."""


TrackerFactory: TypeAlias = Callable[[TrackedRun], Tracker]


@dataclass(frozen=True)
class Registered:
    """Registry entry, see `register_tracker`."""

    factory: TrackerFactory
    module: str = ""
    package: str = ""


TRACKERS: dict[str, Registered] = {}


def register_tracker(
    name: str, module: str = "", package: str = ""
) -> Callable[[TrackerFactory], TrackerFactory]:
    """Return a decorator that registers a tracker class or factory function.

    A tracker gets each iteration once, even if a resumed run repeats it.

    Args:
        name: value for `logging.trackers`.
        module: import name, checked before the run starts.
        package: pip name, if different.

    Raises:
        ValueError: by the decorator, if the name is taken.
    """

    def register(factory: TrackerFactory) -> TrackerFactory:
        if name == JSONL:
            raise ValueError(f"tracker {name!r} is the package's own; choose another name")
        add_to(TRACKERS, name, "tracker")(Registered(factory, module, package or module))
        return factory

    return register


def find_problems(names: Sequence[str]) -> list[Problem]:
    """Return a problem for each unknown tracker or missing package."""
    known = [JSONL, *TRACKERS]
    problems = []
    for name in names:
        if name not in known:
            remedy = f"use {closest(name, known) or JSONL}, or add its file to training.plugins"
            problems.append(Problem(KEY, f"must be of {', '.join(known)}", name, remedy))
            continue
        module = "" if name == JSONL else TRACKERS[name].module.partition(".")[0]
        if module and importlib.util.find_spec(module) is None:
            package = TRACKERS[name].package
            remedy = f"run `pip install {package}`, or remove it from {KEY}"
            problems.append(Problem(KEY, f"needs the package {package}", name, remedy))
    return problems


class Trackers:
    """All trackers used by a run."""

    def __init__(
        self, names: Sequence[str], run: TrackedRun, warn_once: Callable[[str, str], None]
    ) -> None:
        """Start the trackers named in `logging.trackers`, each with its own subfolder.

        `warn_once` is called with (key, message) on failures and prints one message per key.
        """
        self._warn_once = warn_once
        self._run = run
        self._trackers: dict[str, Tracker] = {}
        self._last_recorded: dict[str, int] = {}  # the iteration, from an earlier start
        for name in dict.fromkeys(names):
            if name == JSONL:
                continue
            folder = run.folder / name
            folder.mkdir(parents=True, exist_ok=True)
            recorded = folder / RECORDED
            if recorded.exists():
                numbers = recorded.read_text(encoding="ascii").split()
                self._last_recorded[name] = max(map(int, numbers), default=-1)
            with self._warning_of(name):
                self._trackers[name] = TRACKERS[name].factory(replace(run, folder=folder))

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Send finite metrics to each tracker, except iterations it received before a restart."""
        finite = {name: float(v) for name, v in metrics.items() if math.isfinite(v)}
        for name, tracker in self._trackers.items():
            if iteration > self._last_recorded.get(name, -1):
                with self._warning_of(name):
                    tracker.log(iteration, finite)
                    recorded = self._run.folder / name / RECORDED
                    recorded.write_text(str(iteration), encoding="ascii")

    def close(self) -> None:
        """Finish all trackers."""
        for name, tracker in self._trackers.items():
            with self._warning_of(name):
                tracker.finish()

    @contextmanager
    def _warning_of(self, name: str) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:  # libraries raise SystemExit too
            cause = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            text = f"tracker {name} failed: {cause}; training goes on, metrics.jsonl has all"
            self._warn_once(f"tracker {name}", text)


@register_tracker("tensorboard", module="tensorboard")
class TensorBoardTracker(Tracker):
    """Writes TensorBoard event files."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(run.folder))

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Write one scalar per metric and flush."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, iteration)
        self._writer.flush()  # the iteration counts as recorded from now on

    def finish(self) -> None:
        """Close the event file."""
        self._writer.close()


class _RunTracker(Tracker):
    """Logs to the run object returned by the package's `init` (wandb, swanlab)."""

    _run: Any

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=iteration)

    def finish(self) -> None:
        self._run.finish()


@register_tracker("wandb", module="wandb")
class WandbTracker(_RunTracker):
    """Logs to Weights & Biases; offline files wait for `wandb sync`."""

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # of its own errors, and usage
        import wandb

        settings = wandb.Settings(
            console="off", silent=True, disable_code=True, disable_git=True, x_disable_stats=True,
            x_disable_machine_info=True, x_save_requirements=False, host="withheld",
        )  # fmt: skip
        self._run = wandb.init(
            project=run.project, name=run.name, id=run.run_id, resume="allow",
            dir=str(run.folder), config=dict(run.config), settings=settings,
            mode=_choose_mode(run, "WANDB"),  # type: ignore[arg-type]
        )  # fmt: skip

    def finish(self) -> None:
        """Finish the run and stop wandb's service process, which Ray's shutdown would kill."""
        import wandb

        super().finish()
        wandb.teardown()


@register_tracker("swanlab", module="swanlab")
class SwanLabTracker(_RunTracker):
    """Logs to SwanLab; offline files wait for `swanlab sync`."""

    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        probes = ("hardware", "runtime", "requirements", "conda", "git", "monitor")
        quiet: dict[str, Any] = {
            "probe": dict.fromkeys(probes, False),
            "terminal": {"proxy_type": "none"},
        }
        self._run = swanlab.init(
            project=run.project, name=run.name, id=run.run_id, resume="allow",
            log_dir=str(run.folder), config=dict(run.config), mode=_choose_mode(run, "SWANLAB"),
            settings=swanlab.Settings(**quiet),
        )  # fmt: skip


def _choose_mode(run: TrackedRun, prefix: str) -> str:
    """Return the package's mode from `logging.tracker_mode` and <prefix>_MODE.

    An explicit offline mode wins over the variable. With `auto` and no variable, the tracker is
    online if <prefix>_API_KEY is set.
    """
    variable = os.environ.get(f"{prefix}_MODE")
    if run.offline:
        return "disabled" if variable == "disabled" else "offline"
    if variable:
        return variable
    is_online = run.offline is False or os.environ.get(f"{prefix}_API_KEY")
    return "online" if is_online else "offline"
