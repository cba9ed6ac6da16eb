"""The folder of a run: paths of its files, and checks before a command uses it."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any, TypeVar

import yaml

from mindspeed_rlxf.checkpoint import lock
from mindspeed_rlxf.cluster.errors import StorageUnreadable
from mindspeed_rlxf.config.fields import Resume, extra_of
from mindspeed_rlxf.config.keys import REMOVED, find_field, to_yaml
from mindspeed_rlxf.config.problems import Problem, UserError
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.config.secrets import url_secret, variable_secret
from mindspeed_rlxf.config.unused import idle_keys
from mindspeed_rlxf.weights.atomic import replace_file
from mindspeed_rlxf.weights.state_files import patiently

ABSENT = object()
COMMAND_KEYS = {"training.new_run", "training.resume", "dry_run"}
"""Keys that belong to one command, not to the run."""
VARIABLES = ("resource_pool", "env")


@dataclass(frozen=True)
class Change:
    """A key whose value differs; ABSENT = none. rule: whether a resumed run accepts it, `Resume`"""

    key: str
    before: Any
    now: Any
    rule: Resume

    def __str__(self) -> str:
        before, now = ("absent" if v is ABSENT else repr(v) for v in (self.before, self.now))
        return f"{self.key}: {before} -> {now}"


def find_changes(before: dict[str, Any], now: dict[str, Any]) -> list[Change]:
    """Return the keys that differ, in the order of `now`, then those that only `before` has.

    COMMAND_KEYS and removed keys do not count. A key that one side lacks, because another version
    of the package wrote it, counts as its default, or as ABSENT. Secrets are masked. With
    `reward.allow_changed_function` the text of a reward function may change.

    Args:
        before: Nested dict of `keys.to_tree`, in plain YAML types.
        now: The same.
    """
    old, new = dict(_iterate_leaves(before)), dict(_iterate_leaves(now))
    found = []
    for path in [*new, *(path for path in old if path not in new)]:
        was, will = old.get(path, ABSENT), new.get(path, ABSENT)
        field = find_field(path)
        if field is not None and not field.is_required():
            default = _to_plain(field.get_default(call_default_factory=True))
            was, will = (default if v is ABSENT else v for v in (was, will))
        key = ".".join(path)
        was, will = _hide_secrets(path, was), _hide_secrets(path, will)
        gone = key in REMOVED and will is ABSENT
        if was != will and key not in COMMAND_KEYS and not gone:
            allowed = now.get("reward", {}).get("allow_changed_function") is True
            change = Change(key, was, will, extra_of(field).get("resume", "fixed"))
            free = (allowed and is_function_text(change)) or _is_address(change)
            found.append(replace(change, rule="free") if free else change)
    return found


def is_function_text(change: Change) -> bool:
    """Return whether only hashes of reward function files changed; no function is new or gone."""
    if change.key == "reward.function.sha256":
        return isinstance(change.before, str) and isinstance(change.now, str)
    both = change.before, change.now
    if change.key != "reward.functions" or not all(isinstance(side, list) for side in both):
        return False
    return _without(change.before, "sha256") == _without(change.now, "sha256")


def _is_address(change: Change) -> bool:
    """Return whether only addresses and headers of reward servers differ."""
    if change.key.startswith(("reward.function.url", "reward.function.headers")):
        return change.before is not None and change.now is not None
    both = change.before, change.now
    if change.key != "reward.functions" or not all(isinstance(side, list) for side in both):
        return False
    kinds = [[isinstance(e, dict) and bool(e.get("url")) for e in side] for side in both]
    before, now = (_without(side, "url", "headers") for side in both)
    return kinds[0] == kinds[1] and before == now


def _without(entries: list[Any], *keys: str) -> list[Any]:
    return [{**e, **dict.fromkeys(keys)} if isinstance(e, dict) else e for e in entries]


def _hide_secrets(path: tuple[str, ...], value: Any) -> Any:
    """Hide secrets in the value of a key, which older versions of the package wrote to files."""
    if isinstance(value, str) and "${" not in value:
        if path[:-1] == VARIABLES:
            return str(variable_secret(path[-1], value))
        return str(url_secret(value)) if path == ("reward", "function", "url") else value
    if path == ("reward", "functions") and isinstance(value, list):
        address = ("reward", "function", "url")
        return [
            {**e, "url": _hide_secrets(address, e.get("url"))} if isinstance(e, dict) else e
            for e in value
        ]
    return value


def _iterate_leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(tree, dict) and tree:
        for name, item in tree.items():
            yield from _iterate_leaves(item, (*path, str(name)))
    elif path:
        yield path, tree


def _to_plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_to_plain(item) for item in value]
    return getattr(value, "value", value)


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

        If the folder has a run with other keys (`changes`), the configuration is written to the
        next config.<n>.yaml. Writes a new `mark`. Raises UserError (see `check`).
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
        lock.release(self.path)

    def release(self) -> None:
        """Unlock the folder, and free its name if metrics.jsonl has no line.

        Only the process that has the lock may call it.
        """
        if not self.metrics.exists() or not self.metrics.stat().st_size:
            self.metrics.unlink(missing_ok=True)
            for file in (self.config, *self._find_later_configs().values()):
                file.unlink(missing_ok=True)
        self.unlock()

    @classmethod
    def check(cls, config: RunConfig) -> list[Problem]:
        """Return [the problem that keeps this command from using the folder `choose`]; [] for none.

        A run that cannot be resumed, a live run, or no right to write. Writes nothing. Raises
        UserError if the run's last configuration cannot be read.
        """
        directory = cls.choose(config)
        if directory.is_used and not config.training.new_run:
            problem = directory._find_resume_problem(config)
            return [problem] if problem else []
        obstacle = find_write_obstacle(directory.path)
        return [_not_writable(directory.path, obstacle)] if obstacle else []

    def _find_resume_problem(self, config: RunConfig) -> Problem | None:
        """Return why this configuration cannot resume the run in the folder; None = it can."""
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
        """Return the keys that differ from the last configuration in this folder; [] without one.

        Keys that have no effect in this run are free to change. Raises UserError if the last
        configuration cannot be read.
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
        files = self.path.glob("config.*")
        found = {int(m[1]): file for file in files if (m := LATER_CONFIG.fullmatch(file.name))}
        return dict(sorted(found.items()))

    @classmethod
    def choose(cls, config: RunConfig) -> RunDirectory:
        """Return the folder that the command writes to; nothing is made.

        With training.new_run it is the first of NAME, NAME-2, ... without a run, with
        validation.only the first of validation, validation-2, ... in the run's folder.
        """
        path, new = cls.of_run(config).path, config.training.new_run
        if config.validation.only:
            path, new = path / "validation", True
        return cls(_find_free(path) if new else path)

    @classmethod
    def of_run(cls, config: RunConfig) -> RunDirectory:
        """Return the folder that `training.output_dir` names; `choose` may return another one."""
        return cls(Path(config.training.output_dir).absolute())


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
    candidates = chain([path], (path.with_name(f"{path.name}-{n}") for n in count(2)))
    return next(p for p in candidates if not RunDirectory(p).is_used)


def find_write_obstacle(folder: Path) -> str:
    """Return why files cannot be written in a folder, which may not exist yet; "" if they can."""
    parent = next(p for p in (folder, *folder.parents) if p.exists())
    if not parent.is_dir():
        return f"{parent} is a file"
    return "" if os.access(parent, os.W_OK | os.X_OK) else f"no right to write in {parent}"


def _not_writable(path: Path, reason: str) -> Problem:
    return Problem(
        KEY,
        f"must be a folder that can be written: {reason}",
        repr(str(path)),
        "set training.output_dir to another one",
    )
