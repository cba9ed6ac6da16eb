"""A save of a run fails at each of its steps in turn; then the run goes on to its end.

FOLDER OUTPUT: as `tests.chaos.forked`, each start is a fork of this process. OUTPUT gets `whole`,
and `failed` with all failures. Prints a line for each failure.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from mindspeed_rlxf.run.checkpoints import RunCheckpoints
from mindspeed_rlxf.run.directory import RunDirectory
from mindspeed_rlxf.run.store import RunStore
from mindspeed_rlxf.weights.state_files import content_problem
from tests.chaos.failing_files import FailingFiles, worth_failing
from tests.chaos.forked import Forked

COUNTED = "steps of a save"


def with_failing_save(checkpoints: Path, failing: str) -> None:
    """From now on in this process: the first save that begins has a disk that fails."""
    files = FailingFiles(checkpoints, failing)
    write, publish = RunCheckpoints.write, RunCheckpoints._publish
    installed = files.installed()

    def begin(self: RunCheckpoints, *arguments: object) -> float:
        if not files.steps:
            installed.__enter__()
        return write(self, *arguments)  # type: ignore[arg-type]

    def end(self: RunCheckpoints, *arguments: object) -> None:
        publish(self, *arguments)  # type: ignore[arg-type]
        if files.steps:
            installed.__exit__(None, None, None)
            RunCheckpoints.write, RunCheckpoints._publish = write, publish  # type: ignore[method-assign]
            if not failing:
                (checkpoints.parent / COUNTED).write_text("\n".join(files.steps))

    RunCheckpoints.write, RunCheckpoints._publish = begin, end  # type: ignore[method-assign]


def newest_whole(checkpoints: Path) -> int:
    """Iteration of the newest checkpoint of which every file is what was written; 0 = none."""
    for checkpoint in RunStore(checkpoints).newest_first():
        try:
            entries = checkpoint.read().files
        except ValueError:
            continue
        if not any(content_problem(checkpoint.path, entry) for entry in entries):
            return checkpoint.iteration
    return 0


def main(models: Path, output: Path) -> None:
    whole, failed = output / "whole", RunDirectory(output / "failed")
    count = partial(with_failing_save, RunDirectory(whole).checkpoints, "")
    assert Forked(models, whole, False, count).wait() == 0
    steps = (whole / COUNTED).read_text().splitlines()
    chosen = worth_failing(steps)
    print(f"{len(chosen)} of {len(steps)} steps", flush=True)
    done = 0
    # From the last, after which there is a checkpoint that the others may damage.
    for number, failing in reversed(list(enumerate(chosen, 1))):
        first = partial(with_failing_save, failed.checkpoints, failing)
        status = Forked(models, failed.path, False, first).wait()
        newest = newest_whole(failed.checkpoints)
        print(f"{number} {failing}: ended with {status}, newest {newest}", flush=True)
        assert status == 1, "the run is to say that it could not save"
        assert newest >= max(done, 1), "a checkpoint that was there is gone"
        done = newest
    assert Forked(models, failed.path, False).wait() == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
