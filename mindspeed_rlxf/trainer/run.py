"""One run from a checked configuration to an exit code."""

from __future__ import annotations

import json
import logging
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

from mindspeed_rlxf.config.enums import Role, RuntimeKind
from mindspeed_rlxf.config.errors import UserError
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.sampler import PromptSampler
from mindspeed_rlxf.reporting.run_dir import RunDirectory
from mindspeed_rlxf.runtime.errors import DevicesMissing, RuntimeTimeout, WorkerError
from mindspeed_rlxf.runtime.protocol import Runtime
from mindspeed_rlxf.runtime.role_groups import RoleGroups
from mindspeed_rlxf.trainer.ppo import PpoTrainer
from mindspeed_rlxf.trainer.preflight import Prepared
from mindspeed_rlxf.trainer.prompt_source import PromptSource, as_rows
from mindspeed_rlxf.trainer.recorder import Recorder
from mindspeed_rlxf.trainer.resume import digest, is_finished
from mindspeed_rlxf.trainer.run_checkpoints import RunCheckpoints
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
    try:
        with _stops_as_interrupt():
            if config.runtime.kind is RuntimeKind.LOCAL:
                _run_locally(config, prepared, started)
            else:
                _run_on_ray(config, prepared, started)
    except UserError:
        _release(started)
        raise
    except KeyboardInterrupt:
        print("stopped before train_iters was reached", file=sys.stderr)
        return EXIT_STOPPED
    except DevicesMissing as error:
        _release(started)
        print(f"stopped: {error}", file=sys.stderr)
        return EXIT_STOPPED
    except (WorkerError, RuntimeTimeout) as error:
        return _failed(started, error, str(error))
    except Exception as error:
        logger.exception("the driver failed")
        return _failed(started, error, f"driver: {type(error).__name__}: {error}")
    finally:
        for directory in started:
            directory.unlock()
    return EXIT_DONE


def _run_on_ray(config: RunConfig, prepared: Prepared, started: list[RunDirectory]) -> None:
    from mindspeed_rlxf.runtime.ray_runtime import RayRuntime

    directory = _start(RunDirectory.create(config), prepared, started)
    runtime = RayRuntime.from_config(config, directory.logs, directory.config)
    try:
        train(config, prepared, directory, runtime)
    finally:
        runtime.shutdown()
    _say_done(config, directory)


def _run_locally(config: RunConfig, prepared: Prepared, started: list[RunDirectory]) -> None:
    """In this process, or in all processes of torchrun, of which the first one writes."""
    from mindspeed_rlxf.runtime.local import LocalRuntime

    runtime = LocalRuntime.from_config(config, log_dir=None)
    try:
        directory = runtime.from_first(lambda: RunDirectory.create(config))
        if runtime.is_first:
            _start(directory, prepared, started)
        train(config, prepared, directory, runtime, writes=runtime.is_first)
    finally:
        runtime.shutdown()
    if runtime.is_first:
        _say_done(config, directory)


def _start(
    directory: RunDirectory, prepared: Prepared, started: list[RunDirectory]
) -> RunDirectory:
    started.append(directory)
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
) -> None:
    """Start the roles, go on from the newest checkpoint if there is one, run the loop, write the
    final weights.

    writes: this process writes the metric and sample files.
    """
    parts = {config.pool_of(Role.ACTOR_ROLLOUT): config.parts} if config.parts else {}
    pools = runtime.create_pools(config.resource_pool, parts)
    roles = RoleGroups.build(config, pools, prepared.eos_token_ids)
    prompts = digest(prepared.train_prompts, prepared.eos_token_ids)
    checkpoints = RunCheckpoints(config, roles, directory, prompts, writes)
    say = _say if writes else _say_nothing
    state = checkpoints.restore(say)
    recorder = Recorder(config, directory, prepared.tokenizer, writes)
    try:
        trainer = make_trainer(config, prepared, roles, recorder, checkpoints)
        if state is not None:
            trainer.load_state_dict(state["trainer"])
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
) -> PpoTrainer:
    training = config.training
    sampler = PromptSampler(
        len(prepared.train_prompts),
        training.global_batch_size,
        training.seed,
        config.data.shuffle,
    )
    source = PromptSource(
        prepared.train_prompts,
        sampler,
        config.actor_rollout.n_samples_per_prompt,
        prepared.fixed_responses,
    )
    validator = Validator(
        roles, as_rows(prepared.val_prompts), prepared.validate_by_rule, training.seed, recorder
    )
    return PpoTrainer(config, roles, source, validator, recorder, checkpoints)


def _release(started: list[RunDirectory]) -> None:
    """Nothing has been trained: the same command may take the directory again."""
    for directory in started:
        directory.release()


def _failed(started: list[RunDirectory], error: Exception, message: str) -> int:
    """One message on the console, the whole story in failure.json and the logs."""
    print(f"failed: {message}", file=sys.stderr, flush=True)
    if not started:  # no run directory of our own: it was not made, or another rank writes
        return EXIT_FAILED
    directory = started[0]
    print(f"logs: {directory.logs}", file=sys.stderr, flush=True)
    details = {
        "message": message,
        "error": type(error).__name__,
        **{k: getattr(error, k) for k in ("role", "rank", "host", "phase") if hasattr(error, k)},
        "traceback": "".join(traceback.format_exception(error)),
    }
    text = json.dumps(details, indent=2, ensure_ascii=False, default=str)
    directory.failure.write_text(text + "\n", encoding="utf-8")
    return EXIT_FAILED


def _log_to(directory: RunDirectory) -> None:
    handler = logging.FileHandler(directory.logs / "driver.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter("[%(asctime)s] %(levelname)s %(name)s: %(message)s"))
    package = logging.getLogger("mindspeed_rlxf")
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    console = logging.StreamHandler(sys.stdout)  # which cluster, which nodes, what is waited for
    console.setFormatter(logging.Formatter("ray: %(message)s"))
    logging.getLogger("mindspeed_rlxf.runtime").addHandler(console)


class _stops_as_interrupt:
    """SIGTERM, which schedulers send, ends a run like Ctrl-C does: with everything shut down."""

    def __enter__(self) -> None:
        self._before: Callable[..., Any] | int | None = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.default_int_handler)

    def __exit__(self, *_error: object) -> None:
        signal.signal(signal.SIGTERM, self._before)
