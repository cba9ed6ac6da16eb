"""Report a failed run: a message with the folder of the logs, and failure.json."""

from __future__ import annotations

import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from mindspeed_rlxf.cluster.errors import RuntimeTimeout, WorkerError
from mindspeed_rlxf.run.directory import RunDirectory
from mindspeed_rlxf.run.stopping import StoppedByRule, StopRequest
from mindspeed_rlxf.weights.atomic import replace_file

NAMED = ("role", "rank", "host", "phase", "error", "errno", "cause", "missing", "remote_traceback")


def report(directory: RunDirectory | None, error: BaseException, stop: StopRequest) -> None:
    """Print the error to stderr; with `directory` also write failure.json.

    With `directory` prints the folder of the logs and the lost iterations too, and a warning if
    failure.json cannot be written.
    directory: None on the later ranks of torchrun, and before the run has one
    stop:      knows the iterations in progress and saved
    """
    is_whole = isinstance(error, (WorkerError, RuntimeTimeout, StoppedByRule))
    text = str(error) if is_whole else f"driver: {type(error).__name__}: {error}"
    message = " ".join(text.split())
    where = f" (iteration {stop.under_way})" if stop.under_way else ""
    print(f"failed: {message}{where}", file=sys.stderr, flush=True)
    if directory is None:
        return
    print(f"logs: {directory.logs}; {stop.work_lost}", file=sys.stderr, flush=True)
    details: dict[str, Any] = {
        "message": message,
        "error": type(error).__name__,
        "errno": None,
        "role": "driver",
        "phase": "driver",
        "cause": message,
        **{name: getattr(error, name) for name in NAMED if hasattr(error, name)},
        "iteration": stop.under_way,
        "saved_iteration": stop.saved,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "traceback": "".join(traceback.format_exception(error)),
    }
    text = json.dumps(details, indent=2, ensure_ascii=False, default=str) + "\n"
    try:
        content = text.encode("utf-8", "backslashreplace")
        replace_file(directory.failure, content)
    except OSError as problem:
        print(f"warning: {directory.failure} cannot be written: {problem}", file=sys.stderr)


def archive_failure(file: Path, history: Path) -> None:
    """Append the failure in `file` as a line to `history`, and remove `file`.

    Does nothing if `file` is absent. Text that is no JSON becomes {"message": text}.
    """
    if not file.exists():
        return
    content = file.read_bytes()
    try:
        line = json.dumps(json.loads(content), ensure_ascii=False)
    except ValueError:  # cut off, or edited
        line = json.dumps({"message": content.decode("utf-8", "replace")})
    with open(history, "ab") as stream:
        stream.write((line + "\n").encode("utf-8", "backslashreplace"))
    file.unlink()
