"""The folder of a run: where its files stand, and when it may be taken."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from mindspeed_rlxf.config.dump import to_yaml
from mindspeed_rlxf.config.errors import UserError
from mindspeed_rlxf.config.schema import RunConfig


@dataclass(frozen=True)
class RunDirectory:
    """Paths of a run's files. `create` takes the folder; ranks beside the first only name it."""

    path: Path

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
        """Makes the folder, its logs/ and config.yaml. Raises UserError (see `check`)."""
        if problems := cls.check(config):
            raise UserError(problems)
        directory = cls.choose(config)
        try:
            directory.logs.mkdir(parents=True, exist_ok=True)
            _write_atomically(directory.config, to_yaml(config))
        except OSError as error:
            raise UserError(_not_writable(directory.path, error.strerror or str(error))) from error
        return directory

    def release(self) -> None:
        """Give the folder of a run back that has not trained; its logs stay."""
        if not self.metrics.exists() or not self.metrics.stat().st_size:
            self.metrics.unlink(missing_ok=True)
            self.config.unlink(missing_ok=True)

    @classmethod
    def check(cls, config: RunConfig) -> list[str]:
        """Problems of taking the folder: it holds a run, or cannot be written. Writes nothing."""
        directory = cls.choose(config)
        if directory.is_used:
            return [
                f"training.output_dir={str(directory.path)!r} must not hold another run, it has "
                f"{directory.config.name} or {directory.metrics.name}; set another "
                "training.run_name or training.output_dir, or training.new_run=true to take "
                f"{_next_free(directory.path)}"
            ]
        parent = next(p for p in (directory.path, *directory.path.parents) if p.exists())
        if not parent.is_dir():
            return [_not_writable(directory.path, f"{parent} is a file")]
        if not os.access(parent, os.W_OK | os.X_OK):
            return [_not_writable(directory.path, f"no right to write in {parent}")]
        return []

    @classmethod
    def choose(cls, config: RunConfig) -> RunDirectory:
        """The folder this run would take; with training.new_run the next free `<name>-2`, ..."""
        path = Path(config.training.output_dir).absolute()
        return cls(_next_free(path) if config.training.new_run else path)


def _next_free(path: Path) -> Path:
    """The first of path, path-2, path-3, ... that holds no run."""
    return next(p for p in _candidates(path) if not RunDirectory(p).is_used)


def _candidates(path: Path) -> Iterator[Path]:
    yield path
    yield from (path.with_name(f"{path.name}-{n}") for n in count(2))


def _not_writable(path: Path, found: str) -> str:
    return (
        f"training.output_dir={str(path)!r} must be a folder that can be written: {found}; "
        "set training.output_dir to another one"
    )


def _write_atomically(file: Path, text: str) -> None:
    """The file has the whole text or does not exist, also after a crash."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
