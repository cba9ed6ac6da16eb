"""Run directory: file paths, and checks before a command uses it."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic_core import to_jsonable_python

from mindspeed_rlxf.checkpoint import lock
from mindspeed_rlxf.cluster.errors import StorageUnreadable
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.fields import Resume, extra_of
from mindspeed_rlxf.config.keys import REMOVED, find_field, to_yaml
from mindspeed_rlxf.config.problems import Problem, UserError, shorten_value
from mindspeed_rlxf.config.resolved_files import config_file, list_configs
from mindspeed_rlxf.config.schema import SAVED_AS, LearningConfig, RunConfig
from mindspeed_rlxf.config.unused import idle_keys
from mindspeed_rlxf.weights.atomic import replace_file
from mindspeed_rlxf.weights.state_files import patiently

ABSENT = object()
SHA256 = re.compile(r"reward\.functions?(?:\[(?P<index>\d+)\])?\.sha256")  # of a function's file
COMMAND_KEYS = {"training.new_run", "training.resume", "training.resume_from", "dry_run"}
"""Keys that belong to one command, not to the run."""


@dataclass(frozen=True)
class Change:
    """A key changed from `before` to `now`; `rule`: whether a resumed run accepts it."""

    key: str
    before: Any
    now: Any
    rule: Resume

    def __str__(self) -> str:
        lines = []
        for key, before, now in find_differences(self.key, self.before, self.now):
            entry = SHA256.fullmatch(key)
            if entry is None:
                lines.append(f"{key}: {_show(before)} -> {_show(now)}")
                continue
            file = f"of {key.removesuffix('.sha256')}"
            if entry["index"] is not None:
                file = self.now[int(entry["index"])]["function"].rpartition(":")[0]
            lines.append(f"the file {file} has changed")
        return "; ".join(lines)


def find_differences(key: str, before: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, before, now) of each unequal value inside two mappings or lists."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in {**before, **now}:
            pair = before.get(name, ABSENT), now.get(name, ABSENT)
            yield from find_differences(f"{key}.{name}", *pair)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for index, pair in enumerate(zip(before, now, strict=True)):
            yield from find_differences(f"{key}[{index}]", *pair)
    elif before != now:
        yield key, before, now


def _show(value: Any) -> str:
    return "absent" if value is ABSENT else shorten_value(value)


def find_changes(before: dict[str, Any], now: dict[str, Any]) -> list[Change]:
    """Return the differing keys, in the order of `now`, then those only in `before`.

    Both are nested dicts from `keys.to_tree`, in plain YAML types. COMMAND_KEYS and removed keys do
    not count. A key missing on one side (written by another package version) counts as its default,
    or as ABSENT. Reward server addresses may change, and with `reward.allow_changed_function` also
    the source of a reward function.
    """
    old_leaves = dict(_iterate_leaves(before))
    new_leaves = dict(_iterate_leaves(now))
    allows_new_source = now.get("reward", {}).get("allow_changed_function") is True
    changes = []
    for path in new_leaves | old_leaves:
        key = ".".join(path)
        field = find_field(path)
        default: Any = ABSENT
        if field is not None and not field.is_required():
            default = to_jsonable_python(field.get_default(call_default_factory=True))
        old_value = old_leaves.get(path, default)
        new_value = new_leaves.get(path, default)
        is_removed = key in REMOVED and new_value is ABSENT
        if old_value == new_value or key in COMMAND_KEYS or is_removed:
            continue
        change = Change(key, old_value, new_value, extra_of(field).get("resume", "fixed"))
        is_free = differs_only_in(change, "url", "headers")
        if allows_new_source and differs_only_in(change, "sha256"):
            is_free = True
        changes.append(replace(change, rule="free") if is_free else change)
    return changes


def differs_only_in(change: Change, *names: str) -> bool:
    """Return whether reward functions differ only in these fields, and none is new or gone."""
    sides = change.before, change.now
    if change.key == "reward.functions" and all(isinstance(side, list) for side in sides):
        return _without_fields(change.before, names) == _without_fields(change.now, names)
    keys = tuple(f"reward.function.{name}" for name in names)
    return change.key.startswith(keys) and None not in sides


def _without_fields(functions: list[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    remaining = []
    for function in functions:
        remaining.append({name: value for name, value in function.items() if name not in names})
    return remaining


def _iterate_leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(tree, dict) and tree:
        for name, subtree in tree.items():
            yield from _iterate_leaves(subtree, (*path, str(name)))
    elif path:
        yield path, tree


HF = "hf"
MEGATRON = "megatron"
ADAPTER = "adapter"
KEY = "training.output_dir"
MARK = ".seen_by_all_"
T = TypeVar("T")


class RunDirectory:
    """Paths of a run's files. The first rank creates the folder; the others only compute paths.

    Attributes:
        changes: Keys changed since the run was last started.
        health: Start and end of each health finding.
        consumed: Ledger of each iteration's prompts and sample ids.
        syncs: Receipts of weights that servers got.
        samples_tokens: Folder with one token log per rank making experience.
        timeline: Folder with the timelines of all ranks.
        trackers: Folder with one subfolder per tracker.
        logs: Folder with driver.log, and a subfolder of rank logs per pool.
        mark: File with a new name at each start, visible to every node; None before `create`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.changes: list[Change] = []
        self.mark: Path | None = None
        self.config = config_file(path, 0)
        self.metrics = path / "metrics.jsonl"
        self.health = path / "health.jsonl"
        self.samples = path / "samples.jsonl"
        self.val_samples = path / "val_samples.jsonl"
        self.syncs = path / "sync.jsonl"
        self.consumed = path / "consumed.jsonl"
        self.line_files = self.metrics, self.consumed, self.health, self.samples, self.val_samples
        self.samples_tokens = path / "samples_tokens"
        self.timeline = path / "timeline"
        self.trackers = path / "trackers"
        self.failure = path / "failure.json"
        self.report = path / "report.html"
        self.logs = path / "logs"
        self.checkpoints = path / "checkpoints"

    @property
    def is_used(self) -> bool:
        """Whether config.yaml or metrics.jsonl exists, so a run has written here."""
        try:
            names = readable(lambda: os.listdir(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return self.config.name in names or self.metrics.name in names

    @classmethod
    def create(cls, config: RunConfig) -> RunDirectory:
        """Create or reuse the run's folder: lock it, make logs/, write config.yaml.

        On `changes` the configuration goes to the next config.<n>.yaml. Writes a new `mark`. Raises
        UserError (see `check`).
        """
        problems = cls.check(config)
        if problems:
            raise UserError(problems)
        directory = cls.choose(config)
        try:
            directory.logs.mkdir(parents=True, exist_ok=True)
            lock.take(directory.path)
            directory.changes = directory.compare_with(config)
            configs = list_configs(directory.path)
            if not configs or directory.changes:
                replace_file(config_file(directory.path, len(configs)), to_yaml(config))
            for old in directory.logs.glob(f"{MARK}*"):
                old.unlink(missing_ok=True)
            directory.mark = directory.logs / f"{MARK}{secrets.token_hex(8)}"
            directory.mark.touch()
        except OSError as error:
            directory.unlock()
            raise UserError(_not_writable(directory.path, error.strerror or str(error))) from error
        return directory

    def unlock(self) -> None:
        """Release the lock, if this process holds it."""
        lock.release(self.path)

    def release(self) -> None:
        """Unlock the folder as its holder, and free its name if metrics.jsonl is empty."""
        if not self.metrics.exists() or not self.metrics.stat().st_size:
            self.metrics.unlink(missing_ok=True)
            for file in list_configs(self.path):
                file.unlink()
        self.unlock()

    @classmethod
    def check(cls, config: RunConfig) -> list[Problem]:
        """Return the problem preventing this command from using the folder `choose`, if any.

        It cannot be resumed, is in use, or is not writable. Writes nothing.
        """
        run = cls.choose(config)
        quoted_path = repr(str(run.path))
        if config.training.new_run or not run.is_used:
            obstacle = find_write_obstacle(run.path)
            return [_not_writable(run.path, obstacle)] if obstacle else []
        remedy = f"training.new_run=true to take {_find_free(run.path)}"
        if config.training.resume == "never" or not run.config.exists():
            existing = run.config if run.config.exists() else run.metrics
            rule = f"must not hold another run, it has {existing.name}"
            remedy = f"set another training.run_name or training.output_dir, or {remedy}"
            return [Problem(KEY, rule, quoted_path, remedy)]
        in_use = readable(lambda: lock.find_holder(run.path))
        if in_use is not None:
            return [in_use]
        fixed = [change for change in run.compare_with(config) if change.rule == "fixed"]
        if not fixed:
            return []
        if all(differs_only_in(change, "sha256") for change in fixed):
            remedy = f"reward.allow_changed_function=true to go on with the new text, or {remedy}"
        rule = "must hold the same run to resume it, these keys differ (there -> here): "
        rule += "; ".join(map(str, fixed))
        return [Problem(KEY, rule, quoted_path, f"put them back, or set {remedy}")]

    def compare_with(self, config: RunConfig) -> list[Change]:
        """Return the keys changed since the last configuration in this folder; [] without one.

        Keys without effect in this run are free to change. Raises UserError if the last
        configuration is unreadable.
        """
        configs = list_configs(self.path)
        if not configs:
            return []
        try:
            before = dict(yaml.safe_load(readable(lambda: configs[-1].read_text("utf-8"))))
        except (ValueError, TypeError, yaml.YAMLError):
            rule = "must be what the run wrote, and cannot be read"
            remedy = f"put it back, or set training.new_run=true to take {_find_free(self.path)}"
            raise UserError(Problem(str(configs[-1]), rule, remedy=remedy)) from None
        idle = idle_keys(config)
        changes = []
        for change in find_changes(before, yaml.safe_load(to_yaml(config))):
            changes.append(replace(change, rule="free") if change.key in idle else change)
        return changes

    @classmethod
    def choose(cls, config: RunConfig) -> RunDirectory:
        """Return the folder this command writes to, without creating it.

        With training.new_run: the first unused one among NAME, NAME-2, ...; with validation.only:
        among validation, validation-2, ... in the run's folder.
        """
        path = cls.of_run(config).path
        if config.validation.only:
            return cls(_find_free(path / "validation"))
        return cls(_find_free(path) if config.training.new_run else path)

    @classmethod
    def of_run(cls, config: RunConfig) -> RunDirectory:
        """Return the folder `training.output_dir`; `choose` may return another one."""
        return cls(Path(config.training.output_dir).absolute())


def readable(read: Callable[[], T]) -> T:
    """Return `read()`, retried for some seconds after read errors (`patiently`).

    Raises StorageUnreadable if they persist. FileNotFoundError and ValueErrors pass through.
    """
    try:
        return patiently(read)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        raise
    except OSError as error:
        raise StorageUnreadable(f"a file of the run cannot be read: {error}") from error


def _find_free(path: Path) -> Path:
    candidate = path
    for number in count(2):
        if not RunDirectory(candidate).is_used:
            break
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def find_write_obstacle(folder: Path) -> str:
    """Return why files cannot be written in a folder (it may not exist yet), "" if they can."""
    parent = next(p for p in (folder, *folder.parents) if p.exists())
    if not parent.is_dir():
        return f"{parent} is a file"
    return "" if os.access(parent, os.W_OK | os.X_OK) else f"no right to write in {parent}"


def _not_writable(path: Path, reason: str) -> Problem:
    rule = f"must be a folder that can be written: {reason}"
    return Problem(KEY, rule, repr(str(path)), "set training.output_dir to another one")


def export_folders(config: RunConfig, role: Role, final: Path) -> tuple[Path | None, ...]:
    """Return a role's export folders, in its `save`, else in `final`.

    They are Hugging Face's, Megatron's (None with other engines, which write none), and if the role
    trains adapters one for these.
    """
    section = config.role(role)
    folder = config.save_folder(role)
    assert isinstance(section, LearningConfig), "frozen roles are not exported"
    prefix = final / f"{SAVED_AS[role]}_" if folder is None else f"{folder}/"
    megatron = Path(f"{prefix}{MEGATRON}") if section.backend == "megatron" else None
    adapters = [Path(f"{prefix}{ADAPTER}")] if section.lora.rank else []
    return Path(f"{prefix}{HF}"), megatron, *adapters


def check_save_folders(config: RunConfig, directory: RunDirectory) -> list[Problem]:
    """Return a problem for each `ROLE.save` folder already holding weights or not writable.

    A resumed run may have exported there before, so it checks them only if such a key changed.
    """
    changed = {change.key for change in directory.compare_with(config)}
    if directory.config.exists() and not any(key.endswith(".save") for key in changed):
        return []
    problems = []
    for role in config.roles:
        folder = config.save_folder(role) if role in SAVED_AS else None
        if folder is None:
            continue
        key = f"{role.value}.save"
        paths = export_folders(config, role, folder)
        nonempty = [path for path in paths if path is not None and any(path.glob("*"))]
        if nonempty:
            rule = f"must not hold weights, the run would overwrite those in {nonempty[0]}"
            remedy = "give another folder, or move them away"
            problems.append(Problem(key, rule, repr(str(folder)), remedy))
        obstacle = find_write_obstacle(folder)
        if obstacle:
            rule = f"must be a folder that can be written: {obstacle}"
            problems.append(Problem(key, rule, repr(str(folder)), "give another one"))
    return problems
