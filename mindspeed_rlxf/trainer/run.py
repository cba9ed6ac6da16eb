"""One run from a checked configuration to an exit code."""

from __future__ import annotations

import contextlib
import logging
import math
import sys

from mindspeed_rlxf.checkpoint.run_store import RunStore
from mindspeed_rlxf.config.enums import Role, RuntimeKind
from mindspeed_rlxf.config.errors import UserError
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.reporting.run_dir import RunDirectory
from mindspeed_rlxf.runtime.errors import DevicesMissing, RuntimeTimeout, TooFewDevices, WorkerError
from mindspeed_rlxf.runtime.protocol import Runtime
from mindspeed_rlxf.runtime.role_groups import RoleGroups
from mindspeed_rlxf.trainer import failure, supervisor
from mindspeed_rlxf.trainer.ppo import PpoTrainer
from mindspeed_rlxf.trainer.preflight import Prepared
from mindspeed_rlxf.trainer.prompt_source import PromptSource, as_rows
from mindspeed_rlxf.trainer.recorder import Recorder
from mindspeed_rlxf.trainer.resume import digest, is_finished
from mindspeed_rlxf.trainer.run_checkpoints import RunCheckpoints
from mindspeed_rlxf.trainer.stopping import Stopped, StopRequest
from mindspeed_rlxf.trainer.validation import Validator
from mindspeed_rlxf.trainer.weight_saver import WeightSaver

EXIT_DONE, EXIT_FAILED, EXIT_STOPPED = 0, 1, 75

logger = logging.getLogger(__name__)


def run(config: RunConfig, prepared: Prepared) -> int:
    """Train to the end; returns the exit code of `design`, section 3."""
    directory = RunDirectory.choose(config)
    if is_finished(config, directory):
        print(
            f"done already: {directory.path} has its {config.training.train_iters} iterations; "
            "raise training.train_iters to go on",
            flush=True,
        )
        return EXIT_DONE
    started: list[RunDirectory] = []
    training = config.training
    stop = StopRequest(
        training.stop_grace_s,
        training.max_wall_time,
        supervisor.command_started(),
        history=config.validation.interval + 1,
    )
    try:
        with stop:
            if config.runtime.kind is RuntimeKind.LOCAL:
                _run_locally(config, prepared, started, stop)
            else:
                _run_on_ray(config, prepared, started, stop)
    except UserError as error:
        _release(started)
        if isinstance(error, TooFewDevices):
            supervisor.tell(free=error.free)
        raise
    except (KeyboardInterrupt, Stopped):
        print(f"stopped: {stop.reason or 'SIGINT'}; {stop.lost}", file=sys.stderr, flush=True)
        return EXIT_STOPPED
    except DevicesMissing as error:
        _release(started)
        supervisor.tell(free=error.free)
        print(f"stopped: {error}", file=sys.stderr, flush=True)
        return EXIT_STOPPED
    except Exception as error:
        if not isinstance(error, (WorkerError, RuntimeTimeout)):
            logger.exception("the driver failed")
        for directory in started:  # a full disk has no room for the report otherwise
            with contextlib.suppress(OSError):
                RunStore(directory.checkpoints).clear_unfinished()
        failure.report(started[0] if started else None, error, stop)
        return EXIT_FAILED
    finally:
        for directory in started:
            directory.unlock()
    return EXIT_DONE


def _run_on_ray(
    config: RunConfig, prepared: Prepared, started: list[RunDirectory], stop: StopRequest
) -> None:
    from mindspeed_rlxf.runtime.ray_runtime import RayRuntime

    directory = _start(RunDirectory.create(config), prepared, started)
    _tell(config, directory)
    runtime = RayRuntime.from_config(config, directory.logs, directory.config)
    supervisor.tell(joined=not runtime.cluster.own)
    try:
        train(config, prepared, directory, runtime, stop=stop)
    except WorkerError as error:
        raise runtime.examined(error) from None
    finally:
        runtime.shutdown()
    _say_done(config, directory)


def _tell(config: RunConfig, directory: RunDirectory) -> None:
    """The supervisor what it needs for a restart; before the cluster, which may fail to start."""
    training = config.training
    steps = {
        name: math.lcm(*(layout.world_size // layout.dp for layout in layouts))
        for name in config.resource_pool
        if (layouts := [config.layout(role) for role in config.roles_of(name)])
    }
    supervisor.tell(
        directory=str(directory.path),
        max_restarts=training.max_restarts,
        node_wait_s=training.node_wait_s,
        allow_shrink=training.allow_shrink,
        stop_grace_s=training.stop_grace_s,
        pools={n: {"processes": config.resource_pool[n], "step": s} for n, s in steps.items()},
    )


def _run_locally(
    config: RunConfig, prepared: Prepared, started: list[RunDirectory], stop: StopRequest
) -> None:
    """In this process, or in all processes of torchrun, of which the first one writes."""
    from mindspeed_rlxf.runtime.local import LocalRuntime

    runtime = LocalRuntime.from_config(config, log_dir=None)
    if runtime.world.size > 1:
        stop.agree = lambda mine: runtime.from_first(lambda: mine)
    try:
        directory = runtime.from_first(lambda: RunDirectory.create(config))
        if runtime.is_first:
            _start(directory, prepared, started)
        train(config, prepared, directory, runtime, writes=runtime.is_first, stop=stop)
    finally:
        runtime.shutdown()
    if runtime.is_first:
        _say_done(config, directory)


def _start(
    directory: RunDirectory, prepared: Prepared, started: list[RunDirectory]
) -> RunDirectory:
    started.append(directory)
    failure.put_away(directory.failure, directory.logs / "failures.jsonl")
    _log_to(directory)
    print(f"run directory: {directory.path}", flush=True)
    for change in directory.changes:
        print(f"note: changed since the last start: {change}", flush=True)
    for notice in prepared.notices:
        print(f"note: {notice}", flush=True)
    return directory


def _say_done(config: RunConfig, directory: RunDirectory) -> None:
    print(f"done: {config.training.train_iters} iterations, {directory.path}", flush=True)


def train(
    config: RunConfig,
    prepared: Prepared,
    directory: RunDirectory,
    runtime: Runtime,
    writes: bool = True,
    stop: StopRequest | None = None,
) -> None:
    """Start the roles, go on from the newest checkpoint if there is one, run the loop, write the
    final weights.

    writes: this process writes the metric and sample files.
    stop:   asked after each iteration. Raises Stopped when it ends the run.
    """
    stop = stop or StopRequest(config.training.stop_grace_s)
    parts = {config.pool_of(Role.ACTOR_ROLLOUT): config.parts} if config.parts else {}
    pools = runtime.create_pools(config.resource_pool, parts)
    roles = RoleGroups.build(config, pools, prepared.eos_token_ids)
    prompts = digest(prepared.train_prompts, prepared.eos_token_ids)
    checkpoints = RunCheckpoints(config, roles, directory, prompts, writes)
    say = _say if writes else _say_nothing
    state = checkpoints.restore(say)
    recorder = Recorder(config, directory, prepared.tokenizer, writes)
    try:
        trainer = make_trainer(config, prepared, roles, recorder, checkpoints, stop)
        if state is not None:
            trainer.load_state_dict(state["trainer"])
            stop.resumed(trainer.iteration)
        trainer.fit()
        _export(config, directory, checkpoints, writes)
    finally:
        recorder.close()


def _export(
    config: RunConfig, directory: RunDirectory, checkpoints: RunCheckpoints, writes: bool
) -> None:
    """The last thing of a run; the mark that it is done comes after it."""
    if writes:
        checkpoints.store.forget_export()
    WeightSaver(config, checkpoints.trained, directory, writes).export()
    if writes:
        checkpoints.store.set_exported(config.training.train_iters)


def _say(text: str) -> None:
    print(text, flush=True)
    logger.info(text)


def _say_nothing(text: str) -> None:
    """On ranks that do not write."""


def make_trainer(
    config: RunConfig,
    prepared: Prepared,
    roles: RoleGroups,
    recorder: Recorder,
    checkpoints: RunCheckpoints,
    stop: StopRequest,
) -> PpoTrainer:
    source = PromptSource.from_config(config, prepared.train_prompts, prepared.fixed_responses)
    validator = Validator(
        roles,
        as_rows(prepared.val_prompts),
        prepared.validate_by_rule,
        config.training.seed,
        recorder,
    )
    return PpoTrainer(config, roles, source, validator, recorder, checkpoints, stop)


def _release(started: list[RunDirectory]) -> None:
    """Nothing has been trained: the same command may take the directory again."""
    for directory in started:
        directory.release()


def _log_to(directory: RunDirectory) -> None:
    handler = logging.FileHandler(directory.logs / "driver.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter("[%(asctime)s] %(levelname)s %(name)s: %(message)s"))
    package = logging.getLogger("mindspeed_rlxf")
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    console = logging.StreamHandler(sys.stdout)  # which cluster, which nodes, what is waited for
    console.setFormatter(logging.Formatter("ray: %(message)s"))
    logging.getLogger("mindspeed_rlxf.runtime").addHandler(console)
