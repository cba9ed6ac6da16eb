"""The folder of a run: paths of its files, and checks before a command uses it."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from mindspeed_rlxf.config.dump import to_yaml
from mindspeed_rlxf.config.errors import Problem, UserError
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.files.plain import folder_problem
from mindspeed_rlxf.files.plain_yaml import MAX_BYTES, parse_yaml
from mindspeed_rlxf.files.safe import (
    PRIVATE,
    folder_mode,
    make_private_folder,
    open_file,
    replace_file,
)
from mindspeed_rlxf.run import lock
from mindspeed_rlxf.run.changed_keys import Change, changes

KEY = "training.output_dir"
LATER_CONFIG = re.compile(r"config\.(\d+)\.yaml")


@dataclass(frozen=True)
class RunDirectory:
    """Paths of a run's files. The first rank creates the folder; the others only compute paths.

    changes:   keys that differ from the run that is resumed
    file_mode: mode of all files but weights, see `training.file_mode`
    """

    path: Path
    changes: tuple[Change, ...] = ()
    file_mode: int = PRIVATE

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def val_samples(self) -> Path:
        return self.path / "val_samples.jsonl"

    @property
    def consumed(self) -> Path:
        """Ledger: prompts and sample ids of each iteration."""
        return self.path / "consumed.jsonl"

    @property
    def timeline(self) -> Path:
        """Folder of the timelines of all ranks."""
        return self.path / "timeline"

    @property
    def failure(self) -> Path:
        return self.path / "failure.json"

    @property
    def logs(self) -> Path:
        """Folder of driver.log and of one folder of rank logs per pool."""
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def is_used(self) -> bool:
        """Another run has written here."""
        return self.config.exists() or self.metrics.exists()

    @classmethod
    def create(cls, config: RunConfig) -> RunDirectory:
        """Make the folder with logs/ and config.yaml, and lock it for this process.

        In a folder of the same run, keys that differ go to `changes` and into another
        config.<n>.yaml. Raises UserError (see `check`).
        """
        if problems := cls.check(config):
            raise UserError(problems)
        directory = cls.choose(config)
        try:
            _make_folder(directory.path, directory.file_mode)
            make_private_folder(directory.logs, directory.file_mode)
            lock.take(directory.path, directory.file_mode)
            differing = tuple(directory.changes_to(config))
            if not directory.config.exists():
                replace_file(directory.config, to_yaml(config), directory.file_mode)
            elif differing:
                replace_file(directory._next_config(), to_yaml(config), directory.file_mode)
            for file in (directory.config, *directory._later_configs()):
                open_file(file, "a", directory.file_mode).close()  # of an older mode
        except OSError as error:
            directory.unlock()
            raise UserError(_not_writable(directory.path, error.strerror or str(error))) from error
        return replace(directory, changes=differing)

    def unlock(self) -> None:
        """Release the lock of this process."""
        lock.release(self.path)

    def release(self) -> None:
        """Undo `create` where the run has not trained; logs stay."""
        if not self.metrics.exists() or not self.metrics.stat().st_size:
            self.metrics.unlink(missing_ok=True)
            for file in (self.config, *self._later_configs()):
                file.unlink(missing_ok=True)
        self.unlock()

    @classmethod
    def check(cls, config: RunConfig) -> list[Problem]:
        """Report why the folder cannot be used: another run, a live run, no right to write.

        Writes nothing."""
        directory = cls.choose(config)
        if directory.path.is_dir() and (found := folder_problem(directory.path)):
            return [_not_writable(directory.path, found)]
        if directory.is_used and not config.training.new_run:
            return directory._resume_problems(config)
        parent = next(p for p in (directory.path, *directory.path.parents) if p.exists())
        if not parent.is_dir():
            return [_not_writable(directory.path, f"{parent} is a file")]
        if not os.access(parent, os.W_OK | os.X_OK):
            return [_not_writable(directory.path, f"no right to write in {parent}")]
        return []

    def _resume_problems(self, config: RunConfig) -> list[Problem]:
        free = _next_free(self.path)
        if config.training.resume == "never" or not self.config.exists():
            there = self.config if self.config.exists() else self.metrics
            other = "set another training.run_name or training.output_dir, or training.new_run=true"
            return [
                Problem(
                    KEY,
                    f"must not hold another run, it has {there.name}",
                    repr(str(self.path)),
                    f"{other} to take {free}",
                )
            ]
        if found := lock.problem(self.path):
            return [found]
        fixed = [str(change) for change in self.changes_to(config) if change.rule == "fixed"]
        if fixed:
            differ = f"these keys differ (there -> here): {'; '.join(fixed)}"
            return [
                Problem(
                    KEY,
                    f"must hold the same run to go on with it, {differ}",
                    repr(str(self.path)),
                    f"put them back, or set training.new_run=true to take {free}",
                )
            ]
        return []

    def changes_to(self, config: RunConfig) -> list[Change]:
        """Compare with the last configuration of the run in this folder."""
        if not self.config.exists():
            return []
        latest = [self.config, *self._later_configs()][-1]
        try:
            with open_file(latest, "r", encoding="utf-8") as stream:
                before: Any = parse_yaml(stream.read(MAX_BYTES))
            assert isinstance(before, dict)
        except (OSError, ValueError, yaml.YAMLError, AssertionError):
            free = _next_free(self.path)
            raise UserError(
                Problem(
                    f"{latest}",
                    "must be what the run wrote, and cannot be read",
                    remedy=f"put it back, or set training.new_run=true to take {free}",
                )
            ) from None
        return changes(before, yaml.safe_load(to_yaml(config)))

    def _later_configs(self) -> list[Path]:
        """config.1.yaml, config.2.yaml, ..., in this order."""
        found = [(LATER_CONFIG.fullmatch(file.name), file) for file in self.path.glob("config.*")]
        return [file for _, file in sorted((int(m[1]), file) for m, file in found if m)]

    def _next_config(self) -> Path:
        numbers = [LATER_CONFIG.fullmatch(file.name) for file in self._later_configs()]
        return self.path / f"config.{max((int(m[1]) for m in numbers if m), default=0) + 1}.yaml"

    @classmethod
    def choose(cls, config: RunConfig) -> RunDirectory:
        """The folder of this run; with training.new_run the next free `<name>-2`, ..."""
        path = Path(config.training.output_dir).absolute()
        free = _next_free(path) if config.training.new_run else path
        return cls(free, file_mode=config.training.file_mode_bits)


def _next_free(path: Path) -> Path:
    """The first of path, path-2, path-3, ... that holds no run."""
    return next(p for p in _candidates(path) if not RunDirectory(p).is_used)


def _candidates(path: Path) -> Iterator[Path]:
    yield path
    yield from (path.with_name(f"{path.name}-{n}") for n in count(2))


def _not_writable(path: Path, found: str) -> Problem:
    return Problem(
        KEY,
        f"must be a folder that can be written: {found}",
        repr(str(path)),
        "set training.output_dir to another one",
    )


def _make_folder(path: Path, file_mode: int) -> None:
    """Make the run directory with mode 0711: it holds weights, which others may open by name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=0o711)
    except FileExistsError:  # its owner decides
        return
    path.chmod(stat.S_IMODE(path.stat().st_mode) | folder_mode(file_mode))
