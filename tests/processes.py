"""Start commands that log to a file, wait for their output, and read the files of runs."""

import json
import os
import socket
import subprocess
import sys
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
    """Start a command in `folder`; append its stdout and stderr to the file `log`."""
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
    """Return a copy of this process's environment with this repository first in PYTHONPATH."""
    places = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places), **variables}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def run_python(*words: object, folder: Path = ROOT, timeout_s: float = 600.0, **more: str) -> str:
    """Run Python with these words in `folder`; return all that it printed. more: environment

    Fails the test for an exit code other than 0.
    """
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder, env=with_sources(**more), capture_output=True, text=True, timeout=timeout_s,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def wait_for(text: str, log: Path, process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Wait until the log of the process contains `text`.

    Fails the test when the process ends first, or after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while text not in (output := log.read_text(encoding="utf-8")):
        assert process.poll() is None, f"ended early:\n{output}"
        assert time.monotonic() < deadline, f"no {text!r} in:\n{output}"
        time.sleep(0.1)


def only_line(start: str, output: str) -> str:
    """Return the only line of the output that begins with `start`. Raises ValueError for none or
    several."""
    (line,) = [line for line in output.splitlines() if line.startswith(start)]
    return line


def read_lines(file: Path) -> list[dict]:
    """Return the objects of a file of JSON lines."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """Return the metrics of each iteration of the run in `folder`."""
    return [line["metrics"] for line in read_lines(folder / "metrics.jsonl")]
