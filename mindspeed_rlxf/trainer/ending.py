"""How a run ends: the one place where exceptions become exit codes, reports and failure.json."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from mindspeed_rlxf.checkpoint import supervised
from mindspeed_rlxf.checkpoint.directory import RunDirectory
from mindspeed_rlxf.checkpoint.lock import LockLost
from mindspeed_rlxf.checkpoint.report_file import find_problem, write_report
from mindspeed_rlxf.checkpoint.stopping import Stopped, StoppedByRule, StopRequest
from mindspeed_rlxf.checkpoint.store import RunStore
from mindspeed_rlxf.checkpoint.supervised import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED
from mindspeed_rlxf.cluster.errors import (
    DevicesMissing,
    RuntimeTimeout,
    StorageUnreadable,
    WorkerError,
)
from mindspeed_rlxf.config.problems import UserError
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.trainer.preflight import Prepared
from mindspeed_rlxf.weights.atomic import replace_file

logger = logging.getLogger(__name__)

NAMED = ("role", "rank", "host", "phase", "error", "errno", "cause", "missing", "remote_traceback")


def report(directory: RunDirectory | None, error: BaseException, stop: StopRequest) -> None:
    """Print the error to stderr; with `directory` also the folder of the logs, and failure.json.

    Args:
        directory: None on the later ranks of torchrun, and before the run has one.
        stop: knows the iterations in progress and saved.
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
        replace_file(directory.failure, text.encode("utf-8", "backslashreplace"))
    except OSError as problem:
        print(f"warning: {directory.failure} cannot be written: {problem}", file=sys.stderr)


def archive_failure(file: Path, history: Path) -> None:
    """Move the failure in `file`, if there is one, to a line of `history`.

    Text that is no JSON becomes {"message": text}.
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


class Ending:
    """Context of a run; afterwards `exit_code` is the run's. Only a UserError is raised again.

    0 = the block ended; 75 = stopped, or what it needs is not there now: the same command goes on;
    1 = failed, with failure.json. In the block signals are handled by `stop`. After it the run
    directory is unlocked, and has report.html unless the run was stopped or the user was wrong.
    """

    def __init__(self, config: RunConfig, prepared: Prepared) -> None:
        training = config.training
        self._prepared, self.exit_code = prepared, EXIT_DONE
        self._directory: RunDirectory | None = None  # the one that this process writes to
        self.done = ""  # what was done, for the last line
        self.stop = StopRequest(
            training.stop_grace_s,
            training.max_wall_time,
            supervised.find_command_start(),
            history=config.validation.interval + 1,
        )

    def __enter__(self) -> Ending:
        self.stop.__enter__()
        return self

    def begin(self, directory: RunDirectory) -> None:
        """Use this run directory, which the process has locked, and print it with the notices.

        Moves failure.json of an earlier attempt to failures.jsonl, and logs to driver.log.
        """
        self._directory = directory
        archive_failure(directory.failure, directory.logs / "failures.jsonl")
        _log_to_file(directory)
        notes = [f"changed since the last start: {change}" for change in directory.changes]
        notes = [f"note: {note}" for note in (*notes, *self._prepared.notices)]
        print(f"run directory: {directory.path}", *notes, sep="\n", flush=True)

    def __exit__(
        self, _: type | None, error: BaseException | None, __: TracebackType | None
    ) -> bool:
        self.stop.__exit__()
        try:
            handled = self._end(error)
        finally:
            if self._directory:
                self._directory.unlock()
        if handled and self._directory and self.exit_code != EXIT_STOPPED:
            _write_report(self._directory, self._prepared)
        return handled

    def _end(self, error: BaseException | None) -> bool:
        """Say how the run ended and set the exit code; return False where the error goes on."""
        match error:
            case None:
                if self.done and self._directory:
                    print(f"done: {self.done}, {self._directory.path}", flush=True)
            case UserError():
                self._release()
                return False
            case KeyboardInterrupt() | Stopped():
                self._stopped(f"{self.stop.reason or 'SIGINT'}; {self.stop.work_lost}")
            case LockLost():
                self._stopped(str(error))
            case StorageUnreadable():  # nothing was changed
                self._stopped(f"{error}; run the same command again")
            case DevicesMissing():
                self._release()
                self._stopped(str(error))
            case StoppedByRule():
                supervised.report_facts(no_restart="logging.stop_on ended the run")
                report(self._directory, error, self.stop)
                self.exit_code = EXIT_FAILED
            case Exception():
                if not isinstance(error, (WorkerError, RuntimeTimeout)):
                    logger.error("the driver failed", exc_info=error)
                if self._directory:  # makes room for the report on a full disk
                    with contextlib.suppress(OSError):
                        RunStore(self._directory.checkpoints).clear_unfinished()
                report(self._directory, error, self.stop)
                self.exit_code = EXIT_FAILED
            case _:
                return False
        return True

    def _stopped(self, reason: str) -> None:
        print(f"stopped: {reason}", file=sys.stderr, flush=True)
        self.exit_code = EXIT_STOPPED

    def _release(self) -> None:
        """Unlock the run directory; one without metrics loses its configuration first."""
        if self._directory:
            self._directory.release()


def _write_report(directory: RunDirectory, prepared: Prepared) -> None:
    """Write report.html if an iteration has ended; an error is a warning: the run is over."""
    try:
        if find_problem(directory.path):  # no iteration has ended
            return
        write_report([directory.path], directory.report, tokenizer=prepared.tokenizer)
    except Exception as error:
        logger.warning("the report was not written", exc_info=error)
        print(f"warning: {directory.report} was not written: {error}", file=sys.stderr)
        return
    print(f"report: {directory.report}", flush=True)


def _log_to_file(directory: RunDirectory) -> None:
    """From now on append log records of the package, from INFO on, to driver.log.

    Those of `cluster` are also printed to stdout. The file stays open until the process ends.
    """
    handler = logging.FileHandler(directory.logs / "driver.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter("[%(asctime)s] %(levelname)s %(name)s: %(message)s"))
    package = logging.getLogger("mindspeed_rlxf")
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    console = logging.StreamHandler(sys.stdout)  # cluster, nodes and waits
    console.setFormatter(logging.Formatter("ray: %(message)s"))
    logging.getLogger("mindspeed_rlxf.cluster").addHandler(console)
