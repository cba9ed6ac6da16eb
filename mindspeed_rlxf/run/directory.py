"""The folder of a run: paths of its files, and checks before a command uses it."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import Any, TypeVar

import yaml

from mindspeed_rlxf.cluster.errors import StorageUnreadable
from mindspeed_rlxf.config.errors import Problem, UserError
from mindspeed_rlxf.config.keys import to_yaml
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.config.unused import idle_keys
from mindspeed_rlxf.run import lock
from mindspeed_rlxf.run.changed_keys import Change, find_changes, is_function_text
from mindspeed_rlxf.weights.atomic import replace_file
from mindspeed_rlxf.weights.state_files import patiently

KEY = "training.output_dir"
MARK = ".seen_by_all_"
T = TypeVar("T")
LATER_CONFIG = re.compile(r"config\.(\d+)\.yaml")


class RunDirectory:
    """Paths of a run's files. The first rank creates the folder; the others only compute paths.

    changes:   keys that differ from the run that is resumed
    health:    file with the begin and end of each health finding
    consumed:  ledger of the prompts and sample ids of each iteration
    samples_tokens: folder with a file of each rank that makes experience
    timeline:  folder of the timelines of all ranks
    trackers:  folder of one folder per tracker
    logs:      folder of driver.log and of one folder of rank logs per pool
    mark:      file with a new name at each start, which every node must see; None before `create`
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.changes: list[Change] = []
        self.mark: Path | None = None
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.health = path / "health.jsonl"
        self.samples = path / "samples.jsonl"
        self.val_samples = path / "val_samples.jsonl"
        self.consumed = path / "consumed.jsonl"
        self.samples_tokens = path / "samples_tokens"
        self.timeline = path / "timeline"
        self.trackers = path / "trackers"
        self.failure = path / "failure.json"
        self.report = path / "report.html"
        self.logs = path / "logs"
        self.checkpoints = path / "checkpoints"

    @property
    def is_used(self) -> bool:
        """Whether config.yaml or metrics.jsonl exists, so that a run has written here.

        Raises StorageUnreadable.
        """
        try:
            names = readable(lambda: os.listdir(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return self.config.name in names or self.metrics.name in names

    @classmethod
    def create(cls, config: RunConfig) -> RunDirectory:
        """Make or reuse the run's folder: lock it for this process, make logs/, write config.yaml.

        If the folder has a run already, keys that differ are stored in `changes`; if there are any,
        the configuration is written to the next config.<n>.yaml, else it is not written. Writes
        a new `mark`. Raises UserError (see
        `check`), also for a folder that cannot be written, which is then unlocked.
        """
        if problems := cls.check(config):
            raise UserError(problems)
        directory = cls.choose(config)
        try:
            directory.logs.mkdir(parents=True, exist_ok=True)
            lock.take(directory.path)
            directory.changes = directory.compare_with(config)
            later = directory._find_later_configs()
            if not directory.config.exists():
                replace_file(directory.config, to_yaml(config))
            elif directory.changes:
                number = max(later, default=0) + 1
                later[number] = directory.path / f"config.{number}.yaml"
                replace_file(later[number], to_yaml(config))
            for old in directory.logs.glob(f"{MARK}*"):
                old.unlink(missing_ok=True)
            directory.mark = directory.logs / f"{MARK}{secrets.token_hex(8)}"
            directory.mark.touch()
        except OSError as error:
            directory.unlock()
            raise UserError(_not_writable(directory.path, error.strerror or str(error))) from error
        return directory

    def unlock(self) -> None:
        """Release the lock of this process, if it has it."""
        lock.release(self.path)

    def release(self) -> None:
        """Unlock the folder; first remove the config files if metrics.jsonl is empty or absent.

        An empty metrics.jsonl is removed with them. Only the process that has the lock may call it.
        """
        if not self.metrics.exists() or not self.metrics.stat().st_size:
            self.metrics.unlink(missing_ok=True)
            for file in (self.config, *self._find_later_configs().values()):
                file.unlink(missing_ok=True)
        self.unlock()

    @classmethod
    def check(cls, config: RunConfig) -> list[Problem]:
        """Return [the problem that keeps this command from using the folder `choose`]; [] for none.

        It is a run that cannot be resumed, a live run, or no right to write. Writes nothing. Raises
        UserError where the run's last configuration cannot be read.
        """
        directory = cls.choose(config)
        if directory.is_used and not config.training.new_run:
            problem = directory._find_resume_problem(config)
            return [problem] if problem else []
        obstacle = find_write_obstacle(directory.path)
        return [_not_writable(directory.path, obstacle)] if obstacle else []

    def _find_resume_problem(self, config: RunConfig) -> Problem | None:
        """Return why this configuration cannot resume the run in the folder; None = it can.

        Reasons: resuming is off, there is no config.yaml, another process holds the lock, or keys
        differ that must stay. Raises UserError where the last configuration cannot be read.
        """
        remedy = f"training.new_run=true to take {_find_free(self.path)}"
        if config.training.resume == "never" or not self.config.exists():
            there = self.config if self.config.exists() else self.metrics
            return Problem(
                KEY,
                f"must not hold another run, it has {there.name}",
                repr(str(self.path)),
                f"set another training.run_name or training.output_dir, or {remedy}",
            )
        if holder := lock.find_holder(self.path):
            return holder
        fixed = [change for change in self.compare_with(config) if change.rule == "fixed"]
        if not fixed:
            return None
        if all(map(is_function_text, fixed)):
            remedy = f"reward.allow_changed_function=true to go on with the new text, or {remedy}"
        return Problem(
            KEY,
            "must hold the same run to resume it, these keys differ (there -> here): "
            + "; ".join(map(str, fixed)),
            repr(str(self.path)),
            f"put them back, or set {remedy}",
        )

    def compare_with(self, config: RunConfig) -> list[Change]:
        """Return the keys that differ from the last configuration in this folder.

        Those that have no effect in this run are free to change. [] without config.yaml. Raises
        UserError where the last configuration cannot be read.
        """
        if not self.config.exists():
            return []
        latest = [self.config, *self._find_later_configs().values()][-1]
        try:
            before: Any = yaml.safe_load(readable(lambda: latest.read_text("utf-8")))
            assert isinstance(before, dict)
        except (OSError, ValueError, yaml.YAMLError, AssertionError):
            free = _find_free(self.path)
            raise UserError(
                Problem(
                    f"{latest}",
                    "must be what the run wrote, and cannot be read",
                    remedy=f"put it back, or set training.new_run=true to take {free}",
                )
            ) from None
        idle = idle_keys(config)
        found = find_changes(before, yaml.safe_load(to_yaml(config)))
        return [replace(each, rule="free") if each.key in idle else each for each in found]

    def _find_later_configs(self) -> dict[int, Path]:
        """Return number -> config.<number>.yaml, in ascending order."""
        files = self.path.glob("config.*")
        found = {int(m[1]): file for file in files if (m := LATER_CONFIG.fullmatch(file.name))}
        return dict(sorted(found.items()))

    @classmethod
    def choose(cls, config: RunConfig) -> RunDirectory:
        """Return the folder that the command writes to; nothing is made.

        It is the run's folder. With training.new_run it is the first of `<name>`, `<name>-2`, ...
        without a run. With validation.only it is the first of validation, validation-2, ... without
        a run, in the run's folder.
        """
        path, new = cls.of_run(config).path, config.training.new_run
        if config.validation.only:
            path, new = path / "validation", True
        free = _find_free(path) if new else path
        return cls(free)

    @classmethod
    def of_run(cls, config: RunConfig) -> RunDirectory:
        """Return the run's own folder, which `training.output_dir` names, whatever is in it.

        `choose` may return another one. Makes nothing.
        """
        path = Path(config.training.output_dir).absolute()
        return cls(path)


def readable(read: Callable[[], T]) -> T:
    """Return `read()`, tried again for some seconds after read errors (`patiently`).

    Raises StorageUnreadable if they last; FileNotFoundError and ValueErrors as they are.
    """
    try:
        return patiently(read)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        raise
    except OSError as error:
        raise StorageUnreadable(f"a file of the run cannot be read: {error}") from error


def _find_free(path: Path) -> Path:
    """Return the first of path, path-2, path-3, ... that has no run."""
    candidates = chain([path], (path.with_name(f"{path.name}-{n}") for n in count(2)))
    return next(p for p in candidates if not RunDirectory(p).is_used)


def find_write_obstacle(folder: Path) -> str:
    """Return why files cannot be written in a folder, which may not exist yet; "" if they can.

    Looks at the rights of the nearest folder that exists; writes nothing.
    """
    parent = next(p for p in (folder, *folder.parents) if p.exists())
    if not parent.is_dir():
        return f"{parent} is a file"
    return "" if os.access(parent, os.W_OK | os.X_OK) else f"no right to write in {parent}"


def _not_writable(path: Path, reason: str) -> Problem:
    """Make the problem of a folder that cannot be written."""
    return Problem(
        KEY,
        f"must be a folder that can be written: {reason}",
        repr(str(path)),
        "set training.output_dir to another one",
    )
