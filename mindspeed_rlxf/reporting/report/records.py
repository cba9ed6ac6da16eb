"""Read the files of a run, which may be growing, cut by a kill, or damaged.

No function raises because of a file's content; what cannot be read is left out.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mindspeed_rlxf.files.plain import MAX_JSON, open_plain, read_json, read_pointer
from mindspeed_rlxf.files.plain_yaml import read_yaml
from mindspeed_rlxf.reporting.metrics import read_jsonl

LOG_TAIL = 4 * 2**20  # bytes at the end of driver.log that are searched
RESUMED = "resumed from "


@dataclass(frozen=True)
class Iteration:
    """One line of metrics.jsonl; None = a value that was not finite. time_s: seconds"""

    number: int
    metrics: dict[str, float | None]
    time_s: float


def read_iterations(run: Path) -> list[Iteration]:
    """Return the iterations of metrics.jsonl, sorted; several lines of one iteration are merged.

    Of a metric in several lines the last value counts, as does the last `time_s` (0 if absent).
    Metrics that are no finite number become None.
    """
    found: dict[int, Iteration] = {}
    for record in read_jsonl(run / "metrics.jsonl"):
        number, values = record.get("iteration"), record.get("metrics")
        if not isinstance(number, int) or not isinstance(values, dict):
            continue
        metrics = {k: _finite_number(v) for k, v in values.items()}
        before = found[number].metrics if number in found else {}
        found[number] = Iteration(
            number, before | metrics, _finite_number(record.get("time_s")) or 0.0
        )
    return [found[number] for number in sorted(found)]


def read_configs(run: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return (file name, dotted key -> value) of config.yaml and each later version, oldest first.

    A file that cannot be read is left out.
    """
    later = [file for file in run.glob("config.*.yaml") if file.name.split(".")[1].isdecimal()]
    later.sort(key=lambda file: int(file.name.split(".")[1]))
    found = []
    for file in (run / "config.yaml", *later):
        with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
            found.append((file.name, flatten(read_yaml(file))))
    return found


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return dotted key -> value of nested mappings; an empty inner mapping counts as a value.

    prefix: put before each key with a dot, "" = none. {} for a value that is no mapping, without a
    prefix.
    """
    if not isinstance(value, dict) or (prefix and not value):
        return {prefix: value} if prefix else {}
    parts = (flatten(v, f"{prefix}.{k}" if prefix else str(k)) for k, v in value.items())
    return {key: item for part in parts for key, item in part.items()}


def read_failures(run: Path) -> list[dict[str, Any]]:
    """Return the failures of the run, oldest first, with the fields that the report shows.

    The one of failure.json comes last and has `last`: True; the others, of failures.jsonl, have no
    `last`. Files that are absent or damaged are left out.
    """
    found = list(read_jsonl(run / "logs" / "failures.jsonl"))
    with contextlib.suppress(OSError, ValueError):
        if isinstance(last := read_json(run / "failure.json"), dict):
            found.append({**last, "last": True})
    names = ("time", "role", "rank", "host", "phase", "iteration", "message", "last")
    return [{name: each[name] for name in names if name in each} for each in found]


def read_resumes(run: Path) -> list[str]:
    """Return the lines of driver.log that contain RESUMED, oldest first.

    At most the last 100, of the last LOG_TAIL bytes of the file; [] if it cannot be read.
    """
    with contextlib.suppress(OSError), open_plain(run / "logs" / "driver.log") as stream:
        stream.seek(0, 2)
        stream.seek(max(stream.tell() - LOG_TAIL, 0))
        lines = stream.read(LOG_TAIL).decode("utf-8", "replace").splitlines()
        return [line for line in lines if RESUMED in line][-100:]
    return []


def read_checkpoints(run: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the checkpoints in the order of their names, and "versions" and "layouts" of the last.

    A checkpoint has `name`, `iteration`, `bytes` and `best`. Those set aside are listed too, those
    without a readable manifest are not. The second value is flattened to keys with dots; without
    any checkpoint, returns ([], {}).
    """
    folder, found, about = run / "checkpoints", [], {}
    best = -1
    with contextlib.suppress(OSError, ValueError):
        best = int(read_pointer(folder / "best_checkpointed_iteration.txt"))
    for path in sorted(folder.glob("iter_*")):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            manifest = read_json(path / "manifest.json", MAX_JSON)
            size = sum(entry["size"] for entry in manifest["files"])
            number = int(manifest["iteration"])
            found.append({"name": path.name, "iteration": number, "bytes": size,
                          "best": number == best})  # fmt: skip
            about = {k: v for k, v in manifest.items() if k in ("versions", "layouts")}
    return found, flatten(about)


def _finite_number(value: Any) -> float | None:
    """Return a finite number as float, None for any other value, also for True and False."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer that is too large
        return None
    return number if math.isfinite(number) else None
