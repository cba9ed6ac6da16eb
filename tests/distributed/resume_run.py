"""Start, interrupt and resume the run of `test_resume` on the local runtime.

python -m tests.distributed.resume_run MODELS STEPS
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from mindspeed_rlxf.checkpoint.directory import RunDirectory
from mindspeed_rlxf.cluster.local import LocalRuntime
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.trainer.ppo import Iteration, PpoTrainer
from tests.distributed.llamas import with_local_runtime
from tests.distributed.test_layout_invariance import ARCHITECTURES, fixed_run
from tests.training import train


class Killed(Exception):
    """Ends a run in the middle, as a kill would."""


def start(
    runtime: Any, models: Path, out: Path, killed_in: int | None = None, ranks: int = 1,
    layout: dict[str, Any] | None = None, fixed: bool = False, architecture: str = "untied",
    sections: dict[str, Any] | None = None, **training: Any,
) -> RunDirectory:  # fmt: skip
    """Start the run in the folder `out`, or resume it; return its directory.

    killed_in: iteration in which the run is ended, after the updates of the weights and before
               anything of the iteration is written; None = run to the end
    fixed:     use fixed responses, else sample them
    training:  further keys of the section `training`
    """
    merged = {**(sections or {}), "training": {"save_interval": 1, **training}}
    config, prepared = fixed_run(
        models, out, ARCHITECTURES[architecture], ranks, layout or {}, merged
    )
    if isinstance(runtime, LocalRuntime):
        config = with_local_runtime(config)
    if not fixed:
        prepared.fixed_responses = None
    directory = runtime.from_first(lambda: RunDirectory.create(config))
    finish = PpoTrainer._run_hooks

    def killed(trainer: PpoTrainer, finished: Iteration) -> None:
        if trainer.iteration == killed_in:
            raise Killed
        finish(trainer, finished)

    PpoTrainer._run_hooks = killed  # type: ignore[method-assign]
    try:
        train(config, prepared, directory, runtime, writes=runtime.is_first)
    except Killed:
        assert killed_in is not None
    else:
        assert killed_in is None, "the run ended before it was killed"
    finally:
        PpoTrainer._run_hooks = finish  # type: ignore[method-assign]
        directory.unlock()
    return directory


def flip(file: Path, offset: int = 2000) -> None:
    """Flip the lowest bit of one byte of a file, as a failing disk does."""
    with file.open("r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ 1]))


def main(folder: str, steps: str) -> None:
    """Do the steps one after another.

    steps: JSON list; [out, keywords] calls `start`, the path of a file calls `flip`
    """
    runtime = LocalRuntime(DeviceKind.CPU, timeout_s=60.0)
    try:
        for step in json.loads(steps):
            if isinstance(step, str):
                flip(Path(step))
            else:
                ranks = int(os.environ.get("WORLD_SIZE", "1"))
                start(runtime, Path(folder), Path(step[0]), ranks=ranks, **step[1])
    finally:
        runtime.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
