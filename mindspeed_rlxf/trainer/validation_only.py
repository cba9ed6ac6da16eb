"""Validate the weights of a run without training them (`validation.only`)."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace

from mindspeed_rlxf.cluster.protocol import Runtime
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.reporting.phases import phase
from mindspeed_rlxf.reporting.table import pairs
from mindspeed_rlxf.roles.groups import RoleGroups
from mindspeed_rlxf.run.checkpoints import RunCheckpoints
from mindspeed_rlxf.run.directory import RunDirectory
from mindspeed_rlxf.run.recorder import Recorder
from mindspeed_rlxf.trainer.preflight import Prepared
from mindspeed_rlxf.trainer.validation import Validator


def validate_only(
    config: RunConfig,
    prepared: Prepared,
    directory: RunDirectory,
    runtime: Runtime,
    writes: bool = True,
) -> int:
    """Start the workers, validate the newest undamaged checkpoint, and return its iteration.

    Without a checkpoint, or with training.new_run, validates the weights of `load`, and returns 0.
    directory: folder to write metrics and samples to. The run's own folder is only read, so it may
               be in use
    writes: whether this process writes files and prints the metrics
    Errors: UserError if there are checkpoints and all are damaged.
    """
    parts = {config.pool_of(Role.ACTOR_ROLLOUT): config.parts} if config.parts else {}
    with phase("starting the worker processes"):
        pools = runtime.create_pools(config.resource_pool, parts)
    roles = RoleGroups.build(config, pools, prepared.eos_token_ids, prepared.scores_in_processes)
    recorder = Recorder(config, directory, prepared.tokenizer, writes)
    with contextlib.closing(recorder):
        iteration = 0
        if not config.training.new_run:
            run, actor_alone = RunDirectory.of_run(config), replace(roles, critic=None)
            checkpoints = RunCheckpoints(config, actor_alone, run, "", writes=False)
            iteration = checkpoints.load_newest(recorder.note)
        if not iteration:
            recorder.note(f"weights of {config.actor_rollout.load}")
        validator = Validator(config, roles, prepared.val_prompts, recorder)
        version = config.count_updates(iteration)
        measured = validator.validate(iteration, version, own_line=True)
    if writes:
        print(_describe(iteration, measured), flush=True)
    return iteration


def _describe(iteration: int, measured: Mapping[str, float]) -> str:
    rows = [(name, f"{value:.6g}") for name, value in sorted(measured.items())]
    return f"validation of iteration {iteration}\n{pairs(rows)}"
