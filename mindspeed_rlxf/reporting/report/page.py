"""Build the report: one HTML file with its style, scripts and compressed data.

The data is base64, so no text from a run can close its HTML element, and the script inserts text
as text nodes only. A Content-Security-Policy admits our script and style by hash.
"""

import base64
import gzip
import hashlib
import html
import itertools
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from mindspeed_rlxf.config.problems import printable
from mindspeed_rlxf.reporting.jsonl import null_non_finite
from mindspeed_rlxf.reporting.metric_table import find_metric, show_range
from mindspeed_rlxf.reporting.report.judgement import judge, wall_seconds
from mindspeed_rlxf.reporting.report.records import (
    make_curves,
    read_configs,
    read_failures,
    read_iterations,
)
from mindspeed_rlxf.reporting.report.samples import (
    MAX_SAMPLES,
    TokenSplitter,
    choose_samples,
    cut_for_page,
)

MAX_BYTES = 10 * 10**6  # of the file
OTHER_BYTES = 3 * 10**6  # of these, for everything except samples
METHODS = {
    "ray_online_dpo": "Online DPO", "gae": "PPO", "grpo": "GRPO", "dr_grpo": "Dr. GRPO",
    "rloo": "RLOO", "reinforce_plus_plus": "REINFORCE++",
    "reinforce_plus_plus_baseline": "REINFORCE++ with a baseline", "remax": "ReMax",
}  # fmt: skip
"""Stage or estimator -> its usual name."""


@dataclass(frozen=True)
class RunFolder:
    """A run to report on: its folder, the name to show, and its state (finished, running, ...)."""

    path: Path
    name: str
    state: str
    split: TokenSplitter | None = None


def make_report(
    runs: Sequence[RunFolder], max_samples: int = MAX_SAMPLES, version: str = ""
) -> str:
    """Return the report as HTML text.

    Samples are dropped to keep the text below MAX_BYTES (`_pack_samples`); nothing else is limited.
    With a version, the page asks a server for its version and reloads if it differs.
    """
    main = {"made": time.strftime("%Y-%m-%d %H:%M"), "runs": [_gather(run) for run in runs]}
    room = (MAX_BYTES - OTHER_BYTES) * 3 // 4  # before base64
    blobs = {"main": _pack(main), "samples": _pack_samples(runs, max_samples, room)}

    def digest(text: str) -> str:
        return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    style = _read("vendor/uPlot.min.css") + _read("report/report.css")
    script = (
        f"{_read('vendor/uPlot.iife.min.js')}\n(() => {{\n'use strict';\n"
        f"{_read('report/report.js')}\n}})();"
    )
    policy = (
        f"default-src 'none'; script-src '{digest(script)}'; style-src '{digest(style)}'; "
        f"connect-src '{'self' if version else 'none'}'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    data = "\n".join(
        f'<script type="text/plain" id="data-{name}">{base64.b64encode(blob).decode()}</script>'
        for name, blob in blobs.items()
    )
    return Template(_read("report/report.html")).substitute(
        title=html.escape(", ".join(run.name for run in runs)),
        policy=policy,
        live=version,
        style=style,
        script=script,
        data=data,
    )


def _gather(run: RunFolder) -> dict[str, Any]:
    """Return everything the page shows about a run, except samples."""
    iterations = read_iterations(run.path)
    configs = read_configs(run.path)
    config = configs[-1][1] if configs else {}
    curves = make_curves(iterations)
    stage = config.get("training.stage")
    estimator = config.get("algorithm.adv_estimator")
    method = METHODS.get(str(stage)) or METHODS.get(str(estimator), estimator)
    model = config.get("actor_rollout.model")
    return {
        "name": run.name,
        "state": run.state,
        "done": max((each.number for each in iterations), default=0),
        "planned": config.get("training.train_iters"),
        "seconds": wall_seconds(iterations),
        "subject": printable(f"{method}, model {model}") if model and method else "",
        **judge(iterations, config, read_failures(run.path)),
        "curves": curves,
        "about": _describe_metrics(curves),
        "config": config,
        "changes": _config_changes(configs),
    }


def _describe_metrics(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return name -> row of the metric table, for the names that it has."""
    rows = {}
    for name in names:
        metric = find_metric(name)
        if metric is not None:
            rows[name] = {
                "unit": metric.unit,
                "meaning": metric.meaning,
                "healthy": metric.healthy,
                "range": show_range(metric.healthy),
                "remedy": metric.remedy,
            }
    return rows


def _config_changes(configs: Sequence[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the keys that each file of the configuration changed in the one before it."""
    changes = []
    for (_, before), (file, after) in itertools.pairwise(configs):
        for key in sorted({*before, *after}):
            change = {"file": file, "key": key, "before": before.get(key), "after": after.get(key)}
            if change["before"] != change["after"]:
                changes.append(change)
    return changes


def _pack_samples(runs: Sequence[RunFolder], max_samples: int, room: int) -> bytes:
    """Return compressed samples, repeatedly halving their number until they fit `room` bytes."""
    limit = max_samples // len(runs)
    while True:
        packed_runs = []
        num_samples = []
        for run in runs:
            chosen = choose_samples(run.path, limit)
            samples = cut_for_page(chosen, run.path, run.split)
            packed_runs.append({"samples": samples, "seen": chosen.seen})
            num_samples.append(len(samples))
        blob = _pack(packed_runs)
        if len(blob) <= room or not limit:
            return blob
        limit = min(limit, max(num_samples)) // 2


def _pack(value: Any) -> bytes:
    r"""Return a value as compressed JSON: NaN and infinity null, lone surrogates `\udXXX`."""
    value = null_non_finite(value)
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)
    return gzip.compress(text.encode("utf-8", "backslashreplace"), 6, mtime=0)


def _read(name: str) -> str:
    return (files("mindspeed_rlxf.reporting") / name).read_text(encoding="utf-8")
