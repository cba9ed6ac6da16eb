"""Pack the files that help to diagnose a failed run into one archive, with secrets removed.

An allow-list: configuration, failure, metrics, ends of logs, stacks and the doctor's report.
Weights, samples, data and all other files stay out.
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
SAMPLE_BYTES, MOST_TEXTS = 32 * 2**20, 20_000  # of samples, whose texts are removed
FILE_MODE = re.compile("0?6[046][046]")
CONFIG_FILE = re.compile(r"config(?:\.(\d+))?\.yaml")
LOG_FILE = re.compile(r"(driver|rank_\d+|faulthandler[\w.\-]*|stacks?[\w.\-]*)\.(log|txt)")
STACK_START = re.compile(r"^(Fatal Python error|(Current thread|Thread) 0x|Timeout \()")
STACK_LINE = re.compile(r'^\s+File "|^\s+\.\.\.|^\s*$|^Extension modules')
NOTE = """What is in here was cleaned of secrets, prompts and responses as far as rules can tell.
Look through it before you hand it on.
"""


def write_bundle(folder: Path, report: Report, target_dir: Path) -> Path:
    """Write `NAME-doctor.tar.gz` with the redacted files of the run in `folder`; return its path.

    target_dir: existing folder for the archive; if the name exists there, a number is added to it
    The archive's permissions are the run's `training.file_mode`. Raises UserError if `folder` has
    no run, or for any OSError while the archive is made; an incomplete archive is deleted then.
    """
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
            open_file(target, "xb", _file_mode(_read_config(run))) as file,
            tarfile.open(fileobj=file, mode="w:gz") as archive,
        ):
            for name, text in _bundle_files(run, report, redactor):
                _add_file(archive, f"{target.name.removesuffix('.tar.gz')}/{name}", text)
    except OSError as error:
        if not isinstance(error, FileExistsError):
            target.unlink(missing_ok=True)
        raise UserError(
            Problem(
                str(target),
                f"cannot be written: {error.strerror}",
                remedy="run the command in another folder",
            )
        ) from error
    return target


def _bundle_files(
    run: RunDirectory, report: Report, redactor: Redactor
) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of the files of a bundle.

    Note, report, this process's harmless environment variables, list of files; then configurations,
    failure, metrics, and of each log the text and the stacks. Of long files it is the end. Secrets
    and private texts are removed. Files that a run does not have are left out.
    """
    variables = {k: v for k, v in sorted(os.environ.items()) if is_open_variable(k)}
    yield "README.txt", NOTE
    yield "doctor.json", redactor.clean(json.dumps(report.as_json(), indent=2))
    yield "environment.json", redactor.clean(json.dumps(variables, indent=2))
    yield "files.txt", redactor.clean(printable(_list_files(run.path)))
    for file in _choose_configs(run):
        yield file.name, redactor.clean(_read_tail(file, STACK_BYTES))
    if run.failure.exists():
        yield (
            run.failure.name,
            redactor.clean(_format_failure(_read_tail(run.failure, STACK_BYTES))),
        )
    if run.metrics.exists():
        yield run.metrics.name, _last_metrics(_read_tail(run.metrics, METRIC_LINES * 4096))
    for file in _choose_logs(run):
        name = file.relative_to(run.path).as_posix()
        yield name, redactor.clean(_read_tail(file, TAIL_BYTES))
        stacks = "".join(_stack_lines(file))
        if stacks:
            yield f"stacks/{name}", redactor.clean(stacks[-STACK_BYTES:])


def _format_failure(text: str) -> str:
    """Return a JSON object as lines `key: value`, so that a traceback in it is redacted by lines.

    Values are printed as Python prints them. An empty object, and other text, stays as it is.
    """
    found = _json_object(text)
    return "".join(f"{key}: {value}\n" for key, value in found.items()) or text


def _last_metrics(text: str) -> str:
    """Return iteration, time and metrics of the last METRIC_LINES lines, one JSON object per line.

    Each line is ended; empty text if none is left. Values that are not numbers, and lines that are
    no JSON object, are left out.
    """
    lines = []
    for line in text.splitlines()[-METRIC_LINES:]:
        if found := _json_object(line):
            metrics = found.get("metrics")
            kept = _numbers({key: found.get(key) for key in ("iteration", "time_s")})
            kept["metrics"] = _numbers(metrics if isinstance(metrics, dict) else {})
            lines.append(json.dumps(kept) + "\n")
    return "".join(lines)


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries whose value is a number and not NaN."""
    return {k: v for k, v in values.items() if isinstance(v, (int, float)) and v == v}


def _json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object; return {} for anything else, such as a line that was cut."""
    try:
        found = parse_json(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _choose_configs(run: RunDirectory) -> list[Path]:
    """List at most MOST_CONFIGS configuration files, by ascending number, config.yaml last.

    If there are more, those of the lowest numbers are left out.
    """
    files = islice(run.path.glob("config*.yaml"), MOST_FILES)
    found = [(m[1], file) for file in files if (m := CONFIG_FILE.fullmatch(file.name))]
    found.sort(key=lambda each: int(each[0]) if each[0] else math.inf)
    return [file for _, file in found][-MOST_CONFIGS:]


def _choose_logs(run: RunDirectory) -> list[Path]:
    """List at most MOST_LOGS log files: the driver's, the failed rank's, then the newest.

    Links are not followed: none if the folder of logs is one.
    """
    found = () if run.logs.is_symlink() else islice(run.logs.rglob("*"), MOST_FILES)
    files = [file for file in found if LOG_FILE.fullmatch(file.name) and _is_regular(file)]
    rank = re.search(r'"rank":\s*(\d+)', _read_tail(run.failure, STACK_BYTES))
    failed = f"rank_{int(rank[1]):05d}.log" if rank else ""

    def key(file: Path) -> tuple[bool, bool, float]:
        return file.name != "driver.log", file.name != failed, -file.stat().st_mtime

    return sorted(files, key=key)[:MOST_LOGS]


def _is_regular(file: Path) -> bool:
    """Return whether `file` is a regular file; False for links, which could lead out of the run.

    Raises OSError if there is no such file.
    """
    return stat.S_ISREG(file.lstat().st_mode)


def _read_tail(file: Path, size: int) -> str:
    """Return the last `size` bytes of a file as text; of a longer file from the next line on.

    "" if it cannot be read, or is a link or no regular file. Bytes that are not UTF-8 are replaced.
    """
    try:
        if not _is_regular(file):
            return ""
        with open_file(file, "rb") as stream:
            end = stream.seek(0, os.SEEK_END)
            stream.seek(max(end - size, 0))
            text = str(stream.read(size), "utf-8", "replace")
    except OSError:
        return ""
    return text.partition("\n")[2] if end > size else text


def _stack_lines(file: Path) -> Iterator[str]:
    """Yield the lines of faulthandler's stacks in the last STACK_SEARCH_BYTES of a log."""
    inside = False
    for line in _read_tail(file, STACK_SEARCH_BYTES).splitlines(keepends=True):
        inside = bool(STACK_START.match(line)) or (inside and bool(STACK_LINE.match(line)))
        if inside:
            yield line


def _list_files(folder: Path) -> str:
    """Return size, UTC time and path of the files below `folder`, one per line.

    Files of a folder come before those of its subfolders, both sorted by name. Links are not
    followed. At most MOST_FILES lines; then a last line `and more` says that others exist.
    """
    lines: list[str] = []
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            if len(lines) == MOST_FILES:
                return "\n".join([*lines, "and more"]) + "\n"
            try:
                found = os.lstat(os.path.join(parent, name))
            except FileNotFoundError:  # a running job removes checkpoints and partial files
                continue
            moment = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(found.st_mtime))
            path = Path(parent, name).relative_to(folder).as_posix()
            lines.append(f"{found.st_size:>14}  {moment}  {path}")
    return "\n".join(lines) + "\n"


def private_texts(run: RunDirectory) -> set[str]:
    """Return strings to remove from a bundle: of the data (`_data_texts`) and of logged samples.

    The samples are read from the newest on, SAMPLE_BYTES of each file at most, until there are
    2 x MOST_TEXTS strings. Strings beyond these limits are missing.
    """
    texts = _data_texts(_read_config(run))
    for file in (run.samples, run.val_samples):
        for line in reversed(_read_tail(file, SAMPLE_BYTES).splitlines()):
            texts.update(_strings(_json_object(line)))
            if len(texts) >= 2 * MOST_TEXTS:
                return texts
    return texts


def _data_texts(config: dict[str, Any]) -> set[str]:
    """Return the strings in the first rows of the training and validation files.

    Reads MOST_TEXTS rows of a file at most, stops after SAMPLE_BYTES characters in all, and begins
    no other file once there are MOST_TEXTS strings. Of a file that cannot be read to its end, the
    rows before the fault count.
    """
    texts: set[str] = set()
    size = 0
    for key in ("train_files", "val_files"):
        files = _section(config, "data").get(key)
        for file in files if isinstance(files, list) else ():
            try:
                for _, row in islice(scan_rows(str(file)), MOST_TEXTS):
                    found = set(_strings(row)) if isinstance(row, dict) else set()
                    texts |= found
                    size += sum(map(len, found))
                    if size > SAMPLE_BYTES:
                        return texts
            except (OSError, ValueError, KeyError):  # removed, or no file of rows
                continue
            if len(texts) >= MOST_TEXTS:
                return texts
    return texts


def _read_config(run: RunDirectory) -> dict[str, Any]:
    """Return the mapping in config.yaml, the configuration of the run's first start.

    {} if the file cannot be read or is no YAML mapping. Of a file over STACK_BYTES only the end is
    read.
    """
    try:
        found = parse_yaml(_read_tail(run.config, STACK_BYTES))
    except (yaml.YAMLError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a section of the configuration; {} if it is absent or no mapping."""
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def _file_mode(config: dict[str, Any]) -> int:
    """Return the permission bits for the bundle: `training.file_mode`, if valid, else PRIVATE."""
    found = str(_section(config, "training").get("file_mode"))
    return int(found, 8) if FILE_MODE.fullmatch(found) else PRIVATE


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings among the values of a JSON value, at any depth; keys are left out."""
    if isinstance(value, str):
        yield value
    items = value.values() if isinstance(value, dict) else value
    for item in items if isinstance(value, (dict, list)) else ():
        yield from _strings(item)


def _free_name(folder: Path, run: str) -> Path:
    """Return the first of `RUN-doctor.tar.gz`, `RUN-doctor-2.tar.gz`, ... that does not exist."""
    names = (f"{run}-doctor{'' if n == 1 else f'-{n}'}.tar.gz" for n in count(1))
    return next(folder / name for name in names if not (folder / name).exists())


def _add_file(archive: tarfile.TarFile, name: str, text: str) -> None:
    """Add a text to the archive as a file with mode 0644 and the current time."""
    content = text.encode("utf-8", "replace")
    member = tarfile.TarInfo(name)
    member.size, member.mtime, member.mode = len(content), int(time.time()), 0o644
    archive.addfile(member, io.BytesIO(content))
