"""Trackers of other packages: TensorBoard, wandb, swanlab and trackio.

A package is imported when a run begins that names it. Metrics and the
configuration are sent; the console, the source code and the environment are not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from mindspeed_rlxf.reporting.tracker_registry import TrackedRun, Tracker, register_tracker


@register_tracker("tensorboard", module="tensorboard", rewinds=True)
class TensorBoardTracker(Tracker):
    """Writes event files; on a resume, hides events after the checkpoint (`purge_step`)."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        first = run.resumed + 1 if run.resumed else 0
        self._writer: Any = SummaryWriter(str(run.folder), purge_step=first, flush_secs=10)

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, iteration)

    def finish(self) -> None:
        self._writer.close()


class _RunTracker(Tracker):
    """Logs to the run object that the package's `init` returned (wandb, swanlab, trackio)."""

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


@register_tracker("trackio", module="trackio")
class TrackioTracker(_RunTracker):
    """Logs to trackio, with its database in TRACKIO_DIR.

    Sets TRACKIO_DIR to a folder in the run directory if it is unset.
    """

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(run.folder))
        import trackio

        self._run = trackio.init(
            project=run.project,
            name=f"{run.name}-{run.run_id}",
            resume="allow",
            config=dict(run.config),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )


def _choose_mode(run: TrackedRun, prefix: str) -> str:
    """Return the mode of a tracker's package, by `logging.tracker_mode` and <prefix>_MODE.

    `offline` if the key is that, but `disabled` if the variable says so. Otherwise what the
    variable says; without it `online` if the key is that, or if it is `auto` and <prefix>_API_KEY
    is set, else `offline`.
    """
    asked = os.environ.get(f"{prefix}_MODE")
    if run.offline:
        return "disabled" if asked == "disabled" else "offline"
    has_key = bool(os.environ.get(f"{prefix}_API_KEY"))
    online = has_key if run.offline is None else True
    return asked or ("online" if online else "offline")
