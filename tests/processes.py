"""Start commands with their output in a file, and read what their runs leave."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


def start_logged(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    folder: Path = ROOT,
) -> subprocess.Popen[bytes]:
    """Start a command in `folder`; its output is appended to `log`."""
    with open(log, "ab") as stream:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
        )


def with_sources(**variables: str) -> dict[str, str]:
    """This process's environment, with this repository on the path of imports."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **variables}


def wait_for(text: str, log: Path, process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Wait until the output of the process holds `text`. Fails when it ends before."""
    deadline = time.monotonic() + timeout_s
    while text not in (output := log.read_text(encoding="utf-8")):
        assert process.poll() is None, f"ended early:\n{output}"
        assert time.monotonic() < deadline, f"no {text!r} in:\n{output}"
        time.sleep(0.1)


def only_line(start: str, output: str) -> str:
    """The one line of the output that begins with `start`."""
    (line,) = [line for line in output.splitlines() if line.startswith(start)]
    return line


def read_lines(file: Path) -> list[dict]:
    """Objects of a file of JSON lines."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """Metrics of each iteration of the run in `folder`."""
    return [line["metrics"] for line in read_lines(folder / "metrics.jsonl")]
