"""Make the HTML file: one page with its style, its scripts and its compressed data.

The data is base64, so that no text of a run can close its HTML element. The scripts insert texts
only as text, never as HTML. A Content-Security-Policy allows only our script and style, by hash.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import math
import time
from collections.abc import Mapping, Sequence
from importlib.resources import files
from string import Template
from typing import Any

from mindspeed_rlxf.reporting.report.content import RunFolder, gather
from mindspeed_rlxf.reporting.report.samples import (
    MAX_SAMPLES,
    choose_samples,
    cut_for_page,
)

SCRIPTS = ("base.js", "chart.js", "curves.js", "time.js", "tokens.js", "samples.js", "page.js")
MAX_BYTES = 10 * 10**6  # of the file
OTHER_BYTES = 3 * 10**6  # of these, for everything except samples
FEWER = (1, 4, 16)  # tried in turn: one sample in 1, 4, 16 has numbers per token
LEVEL = 6  # of gzip


def make_report(
    runs: Sequence[RunFolder], max_samples: int = MAX_SAMPLES, version: str = ""
) -> str:
    """Return the HTML text of a report of runs, in the given order.

    Samples are left out to keep it below MAX_BYTES (`pack_samples`); the rest is not limited.
    max_samples: of all runs together; version: see `make_page`
    """
    main = {"made": time.strftime("%Y-%m-%d %H:%M"), "runs": [gather(run) for run in runs]}
    room = (MAX_BYTES - OTHER_BYTES) * 3 // 4  # before base64
    blobs = {"main": pack(main), "samples": pack_samples(runs, max_samples, room)}
    return make_page(", ".join(run.name for run in runs), blobs, version)


def pack_samples(runs: Sequence[RunFolder], max_samples: int, room: int) -> bytes:
    """Return the samples of runs as compressed JSON, in at most `room` bytes if possible.

    If they are too large, fewer training samples get numbers per token; then samples are halved.
    """
    chosen = [choose_samples(run.path, max_samples // len(runs)) for run in runs]
    fewer = iter(FEWER)
    every = next(fewer)
    while True:
        samples = [
            {"samples": cut_for_page(each, run.path, run.split, every), "seen": each.seen,
             "every": every}
            for run, each in zip(runs, chosen, strict=True)
        ]  # fmt: skip
        if len(blob := pack(samples)) <= room or not any(each.count for each in chosen):
            return blob
        if (after := next(fewer, None)) is None:
            chosen = [each.halve() for each in chosen]
        else:
            every = after


def make_page(title: str, blobs: Mapping[str, bytes], version: str = "") -> str:
    """Return the HTML text of a page, with style, scripts and data in it.

    blobs:   name -> compressed JSON to embed
    version: the page asks a server for its version, and loads itself anew if it differs; "" = not
    """
    style = _read("vendor/uPlot.min.css") + _read("report/style.css")
    scripts = "\n".join(_read(f"report/{name}") for name in SCRIPTS)
    script = f"{_read('vendor/uPlot.iife.min.js')}\n(() => {{\n'use strict';\n{scripts}\n}})();"
    asks = "self" if version else "none"
    data = "\n".join(
        f'<script type="text/plain" id="data-{name}">{base64.b64encode(blob).decode()}</script>'
        for name, blob in blobs.items()
    )
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        f"connect-src '{asks}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return Template(_read("report/page.html")).substitute(
        title=html.escape(title),
        policy=policy,
        live=version,
        style=style,
        script=script,
        data=data,
    )


def pack(value: Any) -> bytes:
    r"""Return a value as JSON, compressed with gzip, the same bytes each time.

    NaN and infinity become null, lone surrogates `\udXXX`, values of types that JSON lacks texts.
    """
    text = json.dumps(
        _replace_non_finite(value),
        ensure_ascii=False,
        allow_nan=False,
        separators=(",", ":"),
        default=str,
    )
    return gzip.compress(text.encode("utf-8", "backslashreplace"), LEVEL, mtime=0)


def _replace_non_finite(value: Any) -> Any:
    """Return a copy with None instead of NaN and infinite numbers, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _replace_non_finite(item) for key, item in value.items()}
    return (
        [_replace_non_finite(item) for item in value] if isinstance(value, (list, tuple)) else value
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _read(name: str) -> str:
    return (files("mindspeed_rlxf.reporting") / name).read_text(encoding="utf-8")
