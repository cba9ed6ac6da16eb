"""Run a whole training in one call, on the runtime of a test."""

from typing import Any

from mindspeed_rlxf.checkpoint.directory import RunDirectory
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.trainer.preflight import Prepared, prepare
from mindspeed_rlxf.trainer.run import training


def train(
    config: RunConfig, prepared: Prepared, directory: RunDirectory, runtime: Any, **more: Any
) -> None:
    """Run all iterations and export the final weights. more: keyword arguments of `training`"""
    with training(config, prepared, directory, runtime, **more) as trainer:
        trainer.fit()


def run(
    config: RunConfig, runtime: Any, prepared: Prepared | None = None, **more: Any
) -> RunDirectory:
    """Run all iterations, prepared as usual or as given; return the unlocked run directory."""
    directory = RunDirectory.create(config)
    try:
        train(config, prepared or prepare(config), directory, runtime, **more)
    finally:
        directory.unlock()
    return directory
