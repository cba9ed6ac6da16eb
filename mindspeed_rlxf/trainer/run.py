"""One run, from a checked configuration to an exit code: devices, roles, trainer, final weights."""

import contextlib
import logging
import socket
from collections.abc import Iterator

from mindspeed_rlxf.checkpoint import supervised
from mindspeed_rlxf.checkpoint.checkpoints import RunCheckpoints
from mindspeed_rlxf.checkpoint.directory import RunDirectory
from mindspeed_rlxf.checkpoint.driver_state import hash_prompts, is_finished
from mindspeed_rlxf.checkpoint.exports import export_weights
from mindspeed_rlxf.checkpoint.recorder import Recorder
from mindspeed_rlxf.checkpoint.stopping import StopRequest
from mindspeed_rlxf.cluster.interface import Runtime
from mindspeed_rlxf.cluster.nodes import sees_file, unshared
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.problems import UserError
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.reporting.phases import phase
from mindspeed_rlxf.roles.all_roles import RoleGroups
from mindspeed_rlxf.trainer.ending import Ending
from mindspeed_rlxf.trainer.ppo import PpoTrainer
from mindspeed_rlxf.trainer.preflight import Prepared
from mindspeed_rlxf.trainer.prompt_source import PromptSource
from mindspeed_rlxf.trainer.validation import Validator, validate_only

logger = logging.getLogger(__name__)


def run(config: RunConfig, prepared: Prepared) -> int:
    """Train, or with `validation.only` validate; return the exit code (see `Ending`).

    A run that has all its iterations only says so.

    Raises:
        UserError: the user's mistake; its exit code is that of the caller.
    """
    with Ending(config, prepared) as ending:
        if is_finished(config, directory := RunDirectory.choose(config)):
            print(
                f"done already: {directory.path} has its {config.training.train_iters} iterations; "
                "raise training.train_iters to continue",
                flush=True,
            )
            return ending.exit_code
        with open_runtime(config, ending) as (runtime, directory, writes):
            if config.validation.only:
                iteration = validate_only(config, prepared, directory, runtime, writes)
                ending.done = f"validation of iteration {iteration}"
            else:
                stop = ending.stop
                with training(config, prepared, directory, runtime, writes, stop) as trainer:
                    trainer.fit()
                ending.done = f"{config.training.train_iters} iterations"
    return ending.exit_code


@contextlib.contextmanager
def open_runtime(config: RunConfig, ending: Ending) -> Iterator[tuple[Runtime, RunDirectory, bool]]:
    """Create the run directory and a runtime, which ends with the block; yield them.

    On Ray the cluster is joined or started here, and left or ended after the block. With a local
    runtime every process of torchrun calls this. The third value says whether this process writes
    the files of the run.
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

    When the block ends without an error, exports the final weights and marks the run as finished.

    Args:
        writes: whether this process writes the files of the run.
        stop: decides after each iteration whether `fit` raises Stopped; None = without time limit.
    """
    stop = stop or StopRequest(config.training.stop_grace_s)
    parts = {config.placement[Role.ACTOR_ROLLOUT]: config.parts} if config.parts else {}
    count = sum(sum(processes) for processes in config.resource_pool.values())
    with phase(f"starting {count} worker processes"):
        pools = runtime.create_pools(config.resource_pool, parts)
    roles = RoleGroups.build(config, pools, prepared.eos_token_ids, prepared.scores_in_processes)
    with phase("hashing the prompts"):
        scored = bool(config.reward.parts)
        prompts = hash_prompts(prepared.train_prompts, prepared.eos_token_ids, scored)
    checkpoints = RunCheckpoints(config, roles, directory, prompts, writes)
    with phase("looking for a checkpoint and loading it"):
        state = checkpoints.restore(_announce if writes else lambda _: None)
    recorder = Recorder(config, directory, prepared.tokenizer, writes)
    with contextlib.closing(recorder), contextlib.closing(checkpoints):
        source = PromptSource.from_config(config, prepared.train_prompts, prepared.fixed_responses)
        validator = Validator(config, roles, prepared.val_prompts, recorder)
        trainer = PpoTrainer(config, roles, source, validator, recorder, checkpoints, stop)
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


def report_for_restart(config: RunConfig, directory: RunDirectory) -> None:
    """Tell the supervisor, if there is one, what it needs to start the run again."""
    training = config.training
    supervised.report_facts(
        directory=str(directory.path),
        max_restarts=training.max_restarts,
        node_wait_s=training.node_wait_s,
        stop_grace_s=training.stop_grace_s,
    )


def _announce(text: str) -> None:
    print(text, flush=True)
    logger.info(text)
