"""One run: devices, roles and trainer, from a checked configuration to an exit code."""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mindspeed_rlxf.cluster.errors import (
    DevicesMissing,
    RuntimeTimeout,
    StorageUnreadable,
    TooFewDevices,
    WorkerError,
)
from mindspeed_rlxf.cluster.node_check import sees_file, unshared
from mindspeed_rlxf.cluster.protocol import Runtime
from mindspeed_rlxf.cluster.role_groups import RoleGroups
from mindspeed_rlxf.config.enums import Role, RuntimeKind
from mindspeed_rlxf.config.errors import UserError
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.reporting.phases import phase
from mindspeed_rlxf.run import failure, supervised
from mindspeed_rlxf.run.checkpoints import RunCheckpoints
from mindspeed_rlxf.run.directory import RunDirectory
from mindspeed_rlxf.run.driver_state import hash_prompts, is_finished
from mindspeed_rlxf.run.exports import export_weights
from mindspeed_rlxf.run.lock import LockLost
from mindspeed_rlxf.run.recorder import Recorder
from mindspeed_rlxf.run.report import find_problem, write_report
from mindspeed_rlxf.run.stopping import Stopped, StoppedByRule, StopRequest
from mindspeed_rlxf.run.store import RunStore
from mindspeed_rlxf.run.supervised import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED
from mindspeed_rlxf.trainer.flops import FindPeak
from mindspeed_rlxf.trainer.ppo import PpoTrainer
from mindspeed_rlxf.trainer.preflight import Prepared
from mindspeed_rlxf.trainer.prompt_source import PromptSource
from mindspeed_rlxf.trainer.validation import Validator
from mindspeed_rlxf.trainer.validation_only import validate_only

if TYPE_CHECKING:
    from mindspeed_rlxf.cluster.ray.runtime import RayRuntime

logger = logging.getLogger(__name__)


class Run:
    """One run from a checked configuration to an exit code (design, section 3).

    with Run(config, prepared) as run:
        if trainer := run.start():
            trainer.fit()
    return run.exit_code

    A block that ends without an error exports the final weights, if `start` returned a trainer. An
    error in the block is reported and sets `exit_code`; only a UserError is raised again. Leaving
    the block ends all workers and unlocks the run directory. It writes report.html too, unless the
    run was stopped or a UserError ended it.
    """

    def __init__(
        self, config: RunConfig, prepared: Prepared, find_peak: FindPeak = lambda _: None
    ) -> None:
        """Start nothing yet; the exit code is that of success.

        find_peak: name of a device -> peak FLOP/s, for `throughput/mfu`; None = unknown
        """
        training = config.training
        self.config, self.prepared, self.find_peak = config, prepared, find_peak
        self.exit_code = EXIT_DONE
        self._started: RunDirectory | None = None  # the one that this process writes to
        self._done = ""  # the last line of a run that reached its end
        self._open = contextlib.ExitStack()
        self._stop = StopRequest(
            training.stop_grace_s,
            training.max_wall_time,
            supervised.find_command_start(),
            history=config.validation.interval + 1,
        )

    def __enter__(self) -> Run:
        self._open.enter_context(self._stop)
        return self

    def start(self) -> PpoTrainer | None:
        """Claim devices, build roles, load the newest checkpoint; return the trainer.

        None where there is nothing to train: the run is finished (prints so), or validates only,
        which is done here. Creates and locks the run directory, but not of a finished run.
        Errors: UserError, DevicesMissing, WorkerError, RuntimeTimeout.
        """
        directory = RunDirectory.choose(self.config)
        if is_finished(self.config, directory):
            iterations = self.config.training.train_iters
            print(
                f"done already: {directory.path} has its {iterations} iterations; "
                "raise training.train_iters to continue",
                flush=True,
            )
            return None
        if self.config.runtime.kind is RuntimeKind.LOCAL:
            return self._start_locally()
        return self._start_on_ray()

    def _start_on_ray(self) -> PpoTrainer | None:
        """Create the run directory, join or start a Ray cluster, and return the trainer on it.

        With `validation.only` validates and returns None. Leaving the run's `with` block ends the
        workers and leaves the cluster, which ends if it was started here. Tells the supervisor
        whether a cluster was joined and, without `validation.only`, what a restart needs.
        """
        from mindspeed_rlxf.cluster.ray.runtime import RayRuntime

        directory = self._set_directory(RunDirectory.create(self.config))
        if not self.config.validation.only:
            _report_for_restart(self.config, directory)
        with phase("joining or starting the Ray cluster"):
            runtime = RayRuntime.from_config(self.config, directory.logs, directory.mark)
        self._open.callback(runtime.shutdown)
        self._open.enter_context(_diagnose_worker_errors(runtime))
        supervised.report_facts(joined=not runtime.cluster.own)
        return self._build_trainer(directory, runtime)

    def _start_locally(self) -> PpoTrainer | None:
        """Create the run directory and return the trainer in this process, without Ray.

        With `validation.only` validates and returns None. Every process of torchrun calls it; only
        the first one writes files.
        """
        from mindspeed_rlxf.cluster.local import LocalRuntime

        runtime = LocalRuntime.from_config(self.config, log_dir=None)
        self._open.callback(runtime.shutdown)
        if runtime.world.size > 1:
            self._stop.agree = lambda mine: runtime.from_first(lambda: mine)
        directory = runtime.from_first(lambda: RunDirectory.create(self.config))
        if runtime.is_first:
            self._set_directory(directory)
        elif not sees_file(str(directory.mark)):
            raise UserError(unshared(socket.gethostname()))
        return self._build_trainer(directory, runtime, writes=runtime.is_first)

    def _build_trainer(
        self, directory: RunDirectory, runtime: Runtime, writes: bool = True
    ) -> PpoTrainer | None:
        """Build roles and return a trainer on a runtime, resumed if there is a checkpoint.

        writes: whether this process writes files of the run
        With `validation.only` validates instead, and returns None.
        """
        if self.config.validation.only:
            iteration = validate_only(self.config, self.prepared, directory, runtime, writes)
            if writes:
                self._done = f"done: validation of iteration {iteration}, {directory.path}"
            return None
        trainer = self._open.enter_context(
            training(self.config, self.prepared, directory, runtime, writes, self._stop)
        )
        trainer.find_peak = self.find_peak
        if writes:
            self._done = f"done: {self.config.training.train_iters} iterations, {directory.path}"
        return trainer

    def _set_directory(self, directory: RunDirectory) -> RunDirectory:
        """Set the directory that this process writes to, and return it.

        Moves failure.json of an earlier attempt to failures.jsonl, logs to driver.log, and prints
        the directory, the keys that changed since the last start, and the notices.
        """
        self._started = directory
        history = directory.logs / "failures.jsonl"
        failure.archive_failure(directory.failure, history)
        _log_to_file(directory)
        notes = [f"changed since the last start: {change}" for change in directory.changes]
        notes += self.prepared.notices
        print(
            f"run directory: {directory.path}", *(f"note: {n}" for n in notes), sep="\n", flush=True
        )
        return directory

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> bool:
        try:
            with self._open.pop_all():
                if error is not None:
                    raise error
            if self._done:
                print(self._done, flush=True)
        except UserError as mistake:
            self._release_directory()
            if isinstance(mistake, TooFewDevices):
                supervised.report_facts(free=mistake.free)
            raise
        except (KeyboardInterrupt, Stopped):
            self._end_stopped(f"{self._stop.reason or 'SIGINT'}; {self._stop.work_lost}")
        except LockLost as lost:
            self._end_stopped(str(lost))
        except StoppedByRule as ill:
            supervised.report_facts(no_restart="logging.stop_on ended the run")
            failure.report(self._started, ill, self._stop)
            self.exit_code = EXIT_FAILED
        except DevicesMissing as missing:
            self._release_directory()
            supervised.report_facts(free=missing.free)
            self._end_stopped(str(missing))
        except StorageUnreadable as unreadable:  # nothing was changed
            self._end_stopped(f"{unreadable}; run the same command again")
        except Exception as failed:
            self._end_failed(failed)
        finally:
            if self._started:
                self._started.unlock()
        if self._started and self.exit_code != EXIT_STOPPED:  # a stopped run will be resumed
            self._write_report(self._started)
        return True

    def _end_stopped(self, reason: str) -> None:
        print(f"stopped: {reason}", file=sys.stderr, flush=True)
        self.exit_code = EXIT_STOPPED

    def _end_failed(self, error: Exception) -> None:
        """Remove unfinished checkpoints, report the error, and set the exit code to EXIT_FAILED.

        Logs a traceback too, except for errors of workers and hosts and for timeouts.
        """
        if not isinstance(error, (WorkerError, RuntimeTimeout)):
            logger.error("the driver failed", exc_info=error)
        if self._started:  # makes room for the report on a full disk
            with contextlib.suppress(OSError):
                RunStore(self._started.checkpoints).clear_unfinished()
        failure.report(self._started, error, self._stop)
        self.exit_code = EXIT_FAILED

    def _write_report(self, directory: RunDirectory) -> None:
        """Write report.html if the run has ended an iteration, and print its path.

        An error only prints a warning, because the run is over.
        """
        try:
            if find_problem(directory.path):  # no iteration has ended
                return
            write_report(
                [directory.path],
                directory.report,
                tokenizer=self.prepared.tokenizer,
            )
        except Exception as error:
            logger.warning("the report was not written", exc_info=error)
            print(f"warning: {directory.report} was not written: {error}", file=sys.stderr)
            return
        print(f"report: {directory.report}", flush=True)

    def _release_directory(self) -> None:
        """Unlock the run directory; if no metrics were written, remove its configuration first.

        Does nothing in a process that has no directory to write to.
        """
        if self._started:
            self._started.release()


@contextlib.contextmanager
def _diagnose_worker_errors(runtime: RayRuntime) -> Iterator[None]:
    """In the block, raise a WorkerError anew with what the worker's host shows (`explain_death`).

    For use while the cluster runs.
    """
    try:
        yield
    except WorkerError as error:
        raise runtime.explain_death(error) from None


def _report_for_restart(config: RunConfig, directory: RunDirectory) -> None:
    """Write the keys and pools that a restart needs to the supervisor's file.

    Does nothing without a supervisor.
    Each pool that has roles is given with its number of `processes` and its `step`, of which that
    number must be a multiple.
    """
    training = config.training
    steps = {
        name: math.lcm(*(layout.world_size // layout.dp for layout in layouts))
        for name in config.resource_pool
        if (layouts := [config.layout(role) for role in config.roles_of(name)])
    }
    supervised.report_facts(
        directory=str(directory.path),
        max_restarts=training.max_restarts,
        node_wait_s=training.node_wait_s,
        allow_shrink=training.allow_shrink,
        stop_grace_s=training.stop_grace_s,
        pools={n: {"processes": config.resource_pool[n], "step": s} for n, s in steps.items()},
    )


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

    writes: whether this process writes the files of the run
    stop:   decides after each iteration whether `fit` raises Stopped; None = a new one without
            time limit
    When the block ends without an error, exports the final weights and marks the run as finished.
    After an error it does neither.
    """
    stop = stop or StopRequest(config.training.stop_grace_s)
    parts = {config.pool_of(Role.ACTOR_ROLLOUT): config.parts} if config.parts else {}
    with phase(f"starting {count_processes(config)} worker processes"):
        pools = runtime.create_pools(config.resource_pool, parts)
    roles = RoleGroups.build(config, pools, prepared.eos_token_ids, prepared.scores_in_processes)
    has_functions = bool(config.reward.parts)
    with phase("hashing the prompts"):
        prompts = hash_prompts(prepared.train_prompts, prepared.eos_token_ids, has_functions)
    checkpoints = RunCheckpoints(config, roles, directory, prompts, writes)
    with phase("looking for a checkpoint and loading it"):
        state = checkpoints.restore(_announce if writes else lambda _: None)
    recorder = Recorder(config, directory, prepared.tokenizer, writes)
    with contextlib.closing(recorder), contextlib.closing(checkpoints):
        trainer = make_trainer(config, prepared, roles, recorder, checkpoints, stop)
        if state is not None:
            trainer.load_state_dict(state["trainer"])
            stop.record_resume(trainer.iteration)
        yield trainer
        if writes:
            checkpoints.store.clear_exported()
        with phase("exporting the final weights"):
            export_weights(config, checkpoints.trained, directory, writes)
        if writes:  # last, because it marks the run as finished
            checkpoints.store.set_exported(config.training.train_iters)


def count_processes(config: RunConfig) -> int:
    """Return the number of worker processes of all pools."""
    return sum(sum(processes) for processes in config.resource_pool.values())


def _announce(text: str) -> None:
    print(text, flush=True)
    logger.info(text)


def make_trainer(
    config: RunConfig,
    prepared: Prepared,
    roles: RoleGroups,
    recorder: Recorder,
    checkpoints: RunCheckpoints,
    stop: StopRequest,
) -> PpoTrainer:
    """Return a trainer at iteration 0, with the run's prompt source and a validator."""
    source = PromptSource.from_config(config, prepared.train_prompts, prepared.fixed_responses)
    validator = Validator(config, roles, prepared.val_prompts, recorder)
    return PpoTrainer(config, roles, source, validator, recorder, checkpoints, stop)


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
