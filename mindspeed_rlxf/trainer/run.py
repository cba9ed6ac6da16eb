"""A run, from a checked configuration to an exit code: devices, roles, trainer, final weights.

The only place turning exceptions into exit codes, reports and failure.json.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from mindspeed_rlxf.checkpoint import supervised
from mindspeed_rlxf.checkpoint.checkpoints import RunCheckpoints
from mindspeed_rlxf.checkpoint.directory import RunDirectory
from mindspeed_rlxf.checkpoint.lock import LockLost
from mindspeed_rlxf.checkpoint.report_file import find_problem, write_report
from mindspeed_rlxf.checkpoint.store import RunStore, hash_prompts, is_finished
from mindspeed_rlxf.checkpoint.supervised import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED
from mindspeed_rlxf.cluster.errors import (
    DevicesMissing,
    RuntimeTimeout,
    StorageUnreadable,
    WorkerError,
)
from mindspeed_rlxf.cluster.interface import Runtime
from mindspeed_rlxf.cluster.nodes import sees_file, unshared
from mindspeed_rlxf.config.problems import Problem, UserError
from mindspeed_rlxf.config.schema import LearningConfig, RunConfig
from mindspeed_rlxf.reporting import run_log
from mindspeed_rlxf.reporting.phases import phase
from mindspeed_rlxf.reporting.run_log import say
from mindspeed_rlxf.roles.reward import RewardsFailed
from mindspeed_rlxf.trainer.ppo import PpoTrainer
from mindspeed_rlxf.trainer.preflight import Prepared
from mindspeed_rlxf.trainer.prompt_source import PromptSource
from mindspeed_rlxf.trainer.recorder import Recorder
from mindspeed_rlxf.trainer.stopping import Stopped, StoppedByRule, StopRequest
from mindspeed_rlxf.trainer.validation import Validator, build_roles, validate_only
from mindspeed_rlxf.weights.atomic import replace_file

logger = logging.getLogger(__name__)


def run(config: RunConfig, prepared: Prepared) -> int:
    """Train, or with `validation.only` validate; return the exit code (see `Ending`).

    A run with all its iterations only says so. Raises UserError for the user's mistakes; the caller
    chooses their exit code.
    """
    ending = Ending(config, prepared)
    for _ in run_in_steps(config, prepared, ending):
        pass
    return ending.exit_code


def run_in_steps(config: RunConfig, prepared: Prepared, ending: Ending) -> Iterator[PpoTrainer]:
    """Train as `run` does; yield the trainer once its workers have started, before it trains.

    Yields nothing if the run is finished or only validates.
    """
    with ending:
        if is_finished(config, directory := RunDirectory.choose(config)):
            print(
                f"done already: {directory.path} has its {config.training.train_iters} iterations; "
                "raise training.train_iters to continue",
                flush=True,
            )
            return
        with open_runtime(config, ending) as (runtime, directory, writes):
            if config.validation.only:
                iteration = validate_only(config, prepared, directory, runtime, writes)
                ending.done = f"validation of iteration {iteration}"
            else:
                stop = ending.stop
                with training(config, prepared, directory, runtime, writes, stop) as trainer:
                    yield trainer
                    trainer.fit()
                ending.done = f"{config.training.train_iters} iterations"


@contextlib.contextmanager
def open_runtime(config: RunConfig, ending: Ending) -> Iterator[tuple[Runtime, RunDirectory, bool]]:
    """Create the run directory and a runtime, closed with the block; yield them.

    On Ray this joins or starts the cluster, and leaves or stops it after the block. With a local
    runtime every torchrun process calls this. The third value says whether this process writes the
    run's files.
    """
    with contextlib.ExitStack() as opened:
        if config.runtime.kind == "local":
            from mindspeed_rlxf.cluster.local import LocalRuntime

            local = LocalRuntime.from_config(config)
            opened.callback(local.shutdown)
            if local.size > 1:
                ending.stop.agree = lambda mine: local.from_first(lambda: mine)
            directory = local.from_first(lambda: RunDirectory.create(config))
            if local.is_first:
                ending.begin(directory)
            elif not sees_file(str(directory.mark)):
                raise UserError(unshared(socket.gethostname()))
            yield local, directory, local.is_first
            return
        from mindspeed_rlxf.cluster.ray.runtime import RayRuntime

        directory = RunDirectory.create(config)
        ending.begin(directory)
        if not config.validation.only:
            report_for_restart(config, directory)
        with phase("joining or starting the Ray cluster"):
            runtime = RayRuntime.from_config(config, directory.logs, directory.mark)
        opened.callback(runtime.shutdown)
        supervised.report_facts(joined=not runtime.cluster.own)
        yield runtime, directory, True


@contextlib.contextmanager
def training(
    config: RunConfig,
    prepared: Prepared,
    directory: RunDirectory,
    runtime: Runtime,
    writes: bool = True,
    stop: StopRequest | None = None,
) -> Iterator[PpoTrainer]:
    """Start the workers, build the roles, and yield a trainer, resumed from the newest checkpoint.

    If the block ends without an error, exports the final weights and marks the run finished.
    `writes`: whether this process writes the run's files. `stop` decides after each iteration
    whether `fit` raises Stopped; None = no time limit.
    """
    stop = stop or StopRequest(config.training.stop_grace_s)
    roles = build_roles(config, prepared, runtime, directory)
    with phase("hashing the prompts"):
        inputs = prepared.train_prompts, prepared.eos_token_ids
        prompts = hash_prompts(*inputs, reads_extra_info=bool(config.reward.scoring_functions))
    checkpoints = RunCheckpoints(config, roles, directory, prompts, writes, agree=stop.agree)
    with phase("looking for a checkpoint and loading it"):
        state = checkpoints.restore(say if writes else lambda _: None)
    recorder = Recorder(config, directory, prepared.tokenizer, writes)
    roles.rollout.write_receipt = recorder.write_receipt
    with contextlib.closing(recorder), contextlib.closing(checkpoints):
        source = PromptSource.from_config(config, prepared.train_prompts, prepared.fixed_responses)
        validator = Validator(config, roles, prepared.val_prompts, recorder)
        trainer = PpoTrainer(config, roles, source, validator, recorder, checkpoints, stop)
        if state is not None:
            trainer.load_state_dict(state["trainer"])
            stop.iteration = stop.saved = trainer.iteration
        yield trainer
        with phase("exporting the final weights"):
            checkpoints.export_weights()


def report_for_restart(config: RunConfig, directory: RunDirectory) -> None:
    """Tell the supervisor, if there is one, how to restart the run."""
    training = config.training
    supervised.report_facts(
        directory=str(directory.path),
        max_restarts=training.max_restarts,
        node_wait_s=training.node_wait_s,
        stop_grace_s=training.stop_grace_s,
    )


def describe_schedules(config: RunConfig) -> list[str]:
    """Return a line for each learning-rate schedule that depends on `training.train_iters`."""
    lines: list[str] = []
    for role in config.roles:
        section = config.role(role)
        if not isinstance(section, LearningConfig):
            continue
        optimizer = section.optimizer
        if optimizer.lr_decay_style != "constant" or optimizer.lr_warmup_fraction > 0:
            lines.append(
                f"{role.value}: warm-up and decay of the learning rate now span "
                f"{config.learning_iters(role)} iterations, so the rate of the next ones changes"
            )
    return lines


def report(directory: RunDirectory | None, error: BaseException, stop: StopRequest) -> None:
    """Print the error to stderr; with `directory` also the log folder, and write failure.json.

    `directory` is None on later torchrun ranks, and before the run has one. `stop` knows the
    iterations in progress and saved.
    """
    is_whole = isinstance(error, (WorkerError, RuntimeTimeout, StoppedByRule))
    text = str(error) if is_whole else f"driver: {type(error).__name__}: {error}"
    message = " ".join(text.split())
    where = f" (iteration {stop.under_way})" if stop.under_way else ""
    say(f"failed: {message}{where}", sys.stderr)
    if isinstance(error, RewardsFailed) and error.failed_sample:
        print(error.failed_sample, file=sys.stderr, flush=True)
    if directory is None:
        return
    say(f"logs: {directory.logs}; {stop.work_lost}", sys.stderr)
    names = ("role", "rank", "host", "phase", "error", "errno", "cause", "missing", "failed_sample")
    details: dict[str, Any] = {
        "message": message,
        "error": type(error).__name__,
        "errno": None,
        "role": "driver",
        "phase": "driver",
        "cause": message,
        **{name: getattr(error, name) for name in names if hasattr(error, name)},
        "remote_traceback": getattr(error, "remote_traceback", None),
        "iteration": stop.under_way,
        "saved_iteration": stop.saved,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "traceback": "".join(traceback.format_exception(error)),
    }
    text = json.dumps(details, indent=2, ensure_ascii=False, default=str) + "\n"
    try:
        replace_file(directory.failure, text.encode("utf-8", "backslashreplace"))
    except OSError as problem:
        say(f"warning: {directory.failure} cannot be written: {problem}", sys.stderr)


class Ending:
    """Context of a run, leaving its exit code in `exit_code`. Only UserError is raised again.

    0 = the block ended; 75 = stopped, or something it needs is missing now: the same command
    continues; 1 = failed, with failure.json. Inside the block `stop` handles signals. Afterwards
    the run directory is unlocked, and has report.html unless the run was stopped or the user was
    wrong.
    """

    def __init__(self, config: RunConfig, prepared: Prepared) -> None:
        training = config.training
        self._config = config
        self._prepared = prepared
        self.exit_code = EXIT_DONE
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
        """Use this run directory, locked by the process, and print it with the notices.

        Moves an earlier attempt's failure.json to failures.jsonl, and logs to driver.log.
        """
        self._directory = directory
        if directory.failure.exists():
            with open(directory.logs / "failures.jsonl", "ab") as history:
                history.write(directory.failure.read_bytes().replace(b"\n", b"") + b"\n")
            directory.failure.unlink()
        _log_to_file(directory)
        notes = [f"changed since the last start: {change}" for change in directory.changes]
        if any(change.key == "training.train_iters" for change in directory.changes):
            notes += describe_schedules(self._config)
        notes = [f"note: {note}" for note in (*notes, *self._prepared.notices)]
        for line in (f"run directory: {directory.path}", *notes):
            say(line)

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
        """Print how the run ended and set the exit code; return False to raise the error again.

        Raises UserError if a worker found a mistake of the user.
        """
        if isinstance(error, WorkerError) and error.error == "OptionsRefused":
            if self._directory:
                self._directory.release()
            said = error.cause.partition(": ")[2]
            problem = Problem("rollout.vllm", f"the server does not start: {said}", colon=True)
            raise UserError(problem) from error
        if self._directory and isinstance(error, (UserError, DevicesMissing)):
            self._directory.release()
        match error:
            case None:
                if self.done and self._directory:
                    say(f"done: {self.done}, {self._directory.path}")
            case UserError():
                return False
            case KeyboardInterrupt() | Stopped():
                reason = self.stop.reason or "SIGINT"
                self._stopped(f"{reason}; {self.stop.work_lost}; the same command resumes the run")
            case WorkerError(error="EngineLost"):  # says what the server wrote last
                self._stopped(error.cause)
            case LockLost() | DevicesMissing():
                self._stopped(str(error))
            case StorageUnreadable():  # nothing was changed
                self._stopped(f"{error}; run the same command again")
            case StoppedByRule():
                supervised.report_facts(no_restart="logging.stop_on ended the run")
                report(self._directory, error, self.stop)
                self.exit_code = EXIT_FAILED
            case Exception():
                if not isinstance(error, (WorkerError, RuntimeTimeout)):
                    logger.error("the driver failed", exc_info=error)
                if isinstance(error, RewardsFailed):
                    logger.error("the first sample without a score:\n%s", error.failed_sample)
                    if error.meets_most:
                        again = "most samples meet an error of the reward function"
                        supervised.report_facts(no_restart=again)
                if self._directory:  # makes room for the report on a full disk
                    RunStore(self._directory.checkpoints).clear_unfinished()
                report(self._directory, error, self.stop)
                self.exit_code = EXIT_FAILED
            case _:
                return False
        return True

    def _stopped(self, reason: str) -> None:
        say(f"stopped: {reason}", sys.stderr)
        self.exit_code = EXIT_STOPPED


def _write_report(directory: RunDirectory, prepared: Prepared) -> None:
    """Write report.html if an iteration has ended; an error is a warning, as the run is over."""
    try:
        if not find_problem(directory.path):
            write_report([directory.path], directory.report, tokenizer=prepared.tokenizer)
            say(f"report: {directory.report}")
    except Exception as error:
        logger.warning("the report was not written", exc_info=error)
        say(f"warning: {directory.report} was not written: {error}", sys.stderr)


def _log_to_file(directory: RunDirectory) -> None:
    """Write driver.log until the process ends; also print the log records of `cluster`."""
    run_log.write_to(directory.logs / "driver.log")
    console = logging.StreamHandler(sys.stdout)  # cluster, nodes and waits
    console.setFormatter(logging.Formatter("ray: %(message)s"))
    logging.getLogger("mindspeed_rlxf.cluster").addHandler(console)
