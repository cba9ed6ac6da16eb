"""What helps to find out why a run failed, in one file that can be handed on.

An allow-list: configuration, failure, metrics, ends of logs, stacks and the report. Weights,
samples, data and everything else in the folder stay where they are.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import stat
import tarfile
import time
from collections.abc import Iterator, Mapping
from itertools import count, islice
from pathlib import Path
from typing import Any

import yaml

from mindspeed_rlxf.config.errors import Problem, UserError
from mindspeed_rlxf.data.files import scan_rows
from mindspeed_rlxf.files.plain import parse_json
from mindspeed_rlxf.files.plain_yaml import parse_yaml
from mindspeed_rlxf.files.printable import printable
from mindspeed_rlxf.files.safe import PRIVATE, open_file
from mindspeed_rlxf.ops.doctor.redact import Redactor, is_open_variable
from mindspeed_rlxf.ops.doctor.report import Report
from mindspeed_rlxf.run.directory import RunDirectory

TAIL_BYTES, STACK_BYTES = 64 * 1024, 256 * 1024
MOST_LOGS, METRIC_LINES = 64, 500
MOST_FILES, MOST_CONFIGS = 20_000, 50
STACK_SEARCH_BYTES = 8 * 2**20  # of the end of a log
SAMPLE_BYTES, MOST_TEXTS = 32 * 2**20, 20_000  # of samples, read to know what must not go out
FILE_MODE = re.compile("0?6[046][046]")
CONFIG_FILE = re.compile(r"config(\.\d+)?\.yaml")
LOG_FILE = re.compile(r"(driver|rank_\d+|faulthandler[\w.\-]*|stacks?[\w.\-]*)\.(log|txt)")
STACK_START = re.compile(r"^(Fatal Python error|(Current thread|Thread) 0x|Timeout \()")
STACK_LINE = re.compile(r'^\s+File "|^\s+\.\.\.|^\s*$|^Extension modules')
NOTE = """What is in here was cleaned of secrets, prompts and responses as far as rules can tell.
Look through it before you hand it on.
"""


def write_bundle(folder: Path, report: Report, target_dir: Path) -> Path:
    """Packs the run in `folder`; returns the file. Raises UserError where there is no run."""
    run = RunDirectory(folder.absolute())
    if not (run.config.is_file() or run.failure.is_file() or run.logs.is_dir()):
        raise UserError(
            Problem(
                "--bundle",
                "must be the folder of a run, it has no config.yaml, failure.json or logs",
                folder,
                "give the `run directory:` that the run printed",
            )
        )
    redactor = Redactor(os.environ, private_texts(run))
    target = _free_name(target_dir, run.path.name)
    try:
        with (
            open_file(target, "xb", _mode(run)) as file,
            tarfile.open(fileobj=file, mode="w:gz") as archive,
        ):
            for name, text in _members(run, report, redactor):
                _add(archive, f"{target.name.removesuffix('.tar.gz')}/{name}", text)
    except OSError as error:
        if not isinstance(error, FileExistsError):
            target.unlink(missing_ok=True)
        raise UserError(
            Problem(
                f"{target}",
                f"cannot be written: {error.strerror}",
                remedy="run the command in another folder",
            )
        ) from error
    return target


def _members(run: RunDirectory, report: Report, redactor: Redactor) -> Iterator[tuple[str, str]]:
    """Names and cleaned texts."""
    yield "README.txt", NOTE
    yield "doctor.json", redactor.clean(json.dumps(report.as_json(), indent=2))
    yield "environment.json", redactor.clean(json.dumps(_environment(os.environ), indent=2))
    yield "files.txt", redactor.clean(printable(_listing(run.path)))
    for file in sorted(islice(run.path.glob("config*.yaml"), MOST_FILES))[-MOST_CONFIGS:]:
        if CONFIG_FILE.fullmatch(file.name):
            yield file.name, redactor.clean(_tail(file, STACK_BYTES))
    if run.failure.exists():
        yield run.failure.name, redactor.clean(_failure(_tail(run.failure, STACK_BYTES)))
    if run.metrics.exists():
        yield run.metrics.name, _metrics(_tail(run.metrics, METRIC_LINES * 4096))
    for file in _logs(run):
        name = file.relative_to(run.path).as_posix()
        yield name, redactor.clean(_tail(file, TAIL_BYTES))
        stacks = "".join(_stacks(file))
        if stacks:
            yield f"stacks/{name}", redactor.clean(stacks[-STACK_BYTES:])


def _failure(text: str) -> str:
    """As lines, so that the rules for lines see the traceback as it was printed."""
    try:
        found = parse_json(text)
    except ValueError:
        return text
    if not isinstance(found, dict):
        return text
    return "".join(f"{key}: {value}\n" for key, value in found.items())


def _metrics(text: str) -> str:
    """Numbers only, one object per iteration."""
    lines = []
    for line in text.splitlines()[-METRIC_LINES:]:
        try:
            found = parse_json(line)
        except ValueError:  # the first line of a tail, or one that is being written
            continue
        if isinstance(found, dict):
            kept = {"iteration": found.get("iteration"), "time_s": found.get("time_s")}
            metrics = found.get("metrics")
            named = metrics.items() if isinstance(metrics, dict) else ()
            numbers = {str(name): value for name, value in named if _is_number(value)}
            kept = {name: value for name, value in kept.items() if _is_number(value)}
            lines.append(json.dumps({**kept, "metrics": numbers}))
    return "\n".join(lines) + "\n"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and (isinstance(value, int) or not math.isnan(value))


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in sorted(environment.items()) if is_open_variable(k)}


def _logs(run: RunDirectory) -> list[Path]:
    """The driver's, then those of the rank that failed, then the last that were written to."""
    there = () if run.logs.is_symlink() else islice(run.logs.rglob("*"), MOST_FILES)
    files = [file for file in there if LOG_FILE.fullmatch(file.name)]
    files = [file for file in files if _is_plain(file)]
    rank = re.search(r'"rank":\s*(\d+)', _tail(run.failure, STACK_BYTES))
    failed = f"rank_{int(rank[1]):05d}.log" if rank else ""

    def key(file: Path) -> tuple[bool, bool, float]:
        return file.name != "driver.log", file.name != failed, -file.stat().st_mtime

    return sorted(files, key=key)[:MOST_LOGS]


def _is_plain(file: Path) -> bool:
    """No link: what it leads to was not chosen by the run."""
    return stat.S_ISREG(file.lstat().st_mode)


def _tail(file: Path, size: int) -> str:
    """The last whole lines; empty where there is no plain file."""
    try:
        if not _is_plain(file):
            return ""
        with open_file(file, "rb") as stream:
            end = stream.seek(0, os.SEEK_END)
            stream.seek(max(end - size, 0))
            text = str(stream.read(size), "utf-8", "replace")
    except OSError:
        return ""
    return text.partition("\n")[2] if end > size else text


def _stacks(file: Path) -> Iterator[str]:
    """What faulthandler wrote, wherever it stands in the log."""
    inside = False
    for line in _tail(file, STACK_SEARCH_BYTES).splitlines(keepends=True):
        inside = bool(STACK_START.match(line)) or (inside and bool(STACK_LINE.match(line)))
        if inside:
            yield line


def _listing(folder: Path) -> str:
    """Sizes and times of what is there; of folders of weights only their names."""
    lines: list[str] = []
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            if len(lines) == MOST_FILES:
                return "\n".join([*lines, "and more"]) + "\n"
            found = os.lstat(os.path.join(parent, name))
            moment = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(found.st_mtime))
            path = Path(parent, name).relative_to(folder).as_posix()
            lines.append(f"{found.st_size:>14}  {moment}  {path}")
    return "\n".join(lines) + "\n"


def private_texts(run: RunDirectory) -> set[str]:
    """Prompts, responses and answers: the last ones written down, the first ones of the data."""
    texts = _data_texts(run)
    for file in (run.samples, run.val_samples):
        for line in reversed(_tail(file, SAMPLE_BYTES).splitlines()):
            try:
                texts |= set(_strings(parse_json(line)))
            except ValueError:
                continue
            if len(texts) >= 2 * MOST_TEXTS:
                return texts
    return texts


def _data_texts(run: RunDirectory) -> set[str]:
    """Of the files that the configuration names, where they can be read from here."""
    texts: set[str] = set()
    size = 0
    for file in _data_files(run):
        try:
            for _, row in islice(scan_rows(file), MOST_TEXTS):
                found = set(_strings(row)) if isinstance(row, dict) else set()
                texts |= found
                size += sum(map(len, found))
                if size > SAMPLE_BYTES:
                    return texts
        except (
            OSError,
            ValueError,
            KeyError,
        ):  # gone, or no file of rows
            continue
        if len(texts) >= MOST_TEXTS:
            break
    return texts


def _mode(run: RunDirectory) -> int:
    """Of the bundle: as the run's own files have it."""
    try:
        found = str(yaml.safe_load(_tail(run.config, STACK_BYTES))["training"]["file_mode"])
    except (yaml.YAMLError, KeyError, TypeError, ValueError):
        return PRIVATE
    return int(found, 8) if FILE_MODE.fullmatch(found) else PRIVATE


def _data_files(run: RunDirectory) -> list[str]:
    try:
        data = parse_yaml(_tail(run.config, STACK_BYTES))["data"]
        return [str(file) for key in ("train_files", "val_files") for file in data.get(key) or ()]
    except (yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _free_name(folder: Path, run: str) -> Path:
    names = (f"{run}-doctor{'' if n == 1 else f'-{n}'}.tar.gz" for n in count(1))
    return next(folder / name for name in names if not (folder / name).exists())


def _add(archive: tarfile.TarFile, name: str, text: str) -> None:
    content = text.encode("utf-8", "replace")
    member = tarfile.TarInfo(name)
    member.size, member.mtime, member.mode = len(content), int(time.time()), 0o644
    archive.addfile(member, io.BytesIO(content))
