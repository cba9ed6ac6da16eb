"""Send metrics to trackers; the failure of a tracker is a warning.

Trackers are registered by name (`register_tracker`).
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
from mindspeed_rlxf.config.registry import register_part

KEY = "logging.trackers"
JSONL = "jsonl"  # metrics.jsonl, which every run writes
RECORDED = "recorded.txt"  # the last iteration that the tracker was given


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told about the run.

    Attributes:
        run_id: the same for every start of the same run directory.
        folder: this tracker's folder in the run directory.
        config: the resolved configuration as a tree, without secrets.
        offline: True = send nothing over the network; None = the tracker decides.
    """

    name: str
    project: str
    run_id: str
    folder: Path
    config: Mapping[str, Any]
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


TRACKERS: dict[str, Registered] = {}


def register_tracker(
    name: str, module: str = "", package: str = ""
) -> Callable[[TrackerFactory], TrackerFactory]:
    """Return a decorator that registers a tracker class, or a function that makes a tracker.

    A tracker gets each iteration once, also in a run that is resumed from an earlier checkpoint.

    Args:
        module: must be importable, checked before the run starts.
        package: its pip name, if that is another one.

    Raises:
        ValueError: the decorator's, for a name that is taken.
    """

    def register(factory: TrackerFactory) -> TrackerFactory:
        if name == JSONL:
            raise ValueError(f"tracker {name!r} is the package's own; choose another name")
        register_part(TRACKERS, name, Registered(factory, module, package or module), "tracker")
        return factory

    return register


def find_problems(names: Sequence[str]) -> list[Problem]:
    """Return a problem for each unknown tracker, and each whose package is not installed."""
    problems, known = [], [JSONL, *TRACKERS]
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
    """All trackers of a run."""

    def __init__(
        self, names: Sequence[str], run: TrackedRun, warn_once: Callable[[str, str], None]
    ) -> None:
        """Make the trackers, each with a subfolder of `run.folder`.

        Args:
            names: registered, as in `logging.trackers`; `jsonl` and repeated names are left out.
            warn_once: prints the text of a failure, unless called for the same tracker before.
        """
        self._warn_once, self._run = warn_once, run
        self._trackers: dict[str, Tracker] = {}
        self._last: dict[str, int] = {}  # iteration that each tracker got in an earlier start
        for name in dict.fromkeys(names):
            if name == JSONL:
                continue
            folder = run.folder / name
            folder.mkdir(parents=True, exist_ok=True)
            recorded = folder / RECORDED
            if recorded.exists():
                numbers = recorded.read_text(encoding="ascii").split()
                self._last[name] = max(map(int, numbers), default=-1)
            with self._warning_of(name):
                self._trackers[name] = TRACKERS[name].factory(replace(run, folder=folder))

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Give the finite metrics of an iteration to each tracker.

        A tracker gets no iteration that an earlier start gave it.
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
            cause = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            text = f"tracker {name} failed: {cause}; training goes on, metrics.jsonl has all"
            self._warn_once(f"tracker {name}", text)


@register_tracker("tensorboard", module="tensorboard")
class TensorBoardTracker(Tracker):
    """Writes event files."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(run.folder))

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, iteration)
        self._writer.flush()  # the iteration counts as recorded from now on

    def finish(self) -> None:
        self._writer.close()


class _RunTracker(Tracker):
    """Logs to the run object that the package's `init` returned (wandb, swanlab)."""

    _run: Any

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=iteration)

    def finish(self) -> None:
        self._run.finish()


@register_tracker("wandb", module="wandb")
class WandbTracker(_RunTracker):
    """Logs to Weights & Biases; offline, its files wait for `wandb sync`."""

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # of its own errors, and usage
        import wandb

        settings = wandb.Settings(
            console="off",
            silent=True,
            disable_code=True,
            disable_git=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
            host="withheld",
        )
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.run_id,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.config),
            mode=_choose_mode(run, "WANDB"),  # type: ignore[arg-type]
            settings=settings,
        )

    def finish(self) -> None:
        """Finish the run and wandb's service process, which the end of Ray would kill."""
        import wandb

        super().finish()
        wandb.teardown()


@register_tracker("swanlab", module="swanlab")
class SwanLabTracker(_RunTracker):
    """Logs to SwanLab; offline, its files wait for `swanlab sync`."""

    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        probes = ("hardware", "runtime", "requirements", "conda", "git", "monitor")
        quiet: dict[str, Any] = {
            "probe": dict.fromkeys(probes, False),
            "terminal": {"proxy_type": "none"},
        }
        self._run = swanlab.init(
            project=run.project,
            name=run.name,
            id=run.run_id,
            resume="allow",
            log_dir=str(run.folder),
            config=dict(run.config),
            mode=_choose_mode(run, "SWANLAB"),
            settings=swanlab.Settings(**quiet),
        )


def _choose_mode(run: TrackedRun, prefix: str) -> str:
    """Return the mode of a tracker's package, by `logging.tracker_mode` and <prefix>_MODE.

    A run that is offline by the key stays so. Otherwise the variable decides; without it, `auto` is
    online if <prefix>_API_KEY is set.
    """
    asked = os.environ.get(f"{prefix}_MODE")
    if run.offline:
        return "disabled" if asked == "disabled" else "offline"
    online = run.offline is False or os.environ.get(f"{prefix}_API_KEY")
    return asked or ("online" if online else "offline")
