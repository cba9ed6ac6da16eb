"""Let the save of a run fail at each of its steps in turn, and restart the run after each failure.

    python -m tests.chaos.failing_saves MODELS OUTPUT

Each start is a fork of this process, as in `tests.chaos.forked`. OUTPUT gets the run `whole`, which
nothing disturbs, and the run `failed`. Prints a line for each failure.
"""

import sys
from functools import partial
from pathlib import Path

from mindspeed_rlxf.checkpoint.checkpoints import RunCheckpoints
from mindspeed_rlxf.checkpoint.directory import RunDirectory
from mindspeed_rlxf.checkpoint.store import RunStore
from mindspeed_rlxf.weights.state_files import find_damage, role_entries
from tests.chaos.failing_files import FailingFiles, choose_steps
from tests.chaos.forked import Forked

STEPS_FILE = "steps of a save"


def with_failing_save(checkpoints: Path, failing: str) -> None:
    """Patch RunCheckpoints in this process so that its first save uses `FailingFiles`.

    failing: step that fails; "" = none: then write all steps to STEPS_FILE beside `checkpoints`
    """
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
                (checkpoints.parent / STEPS_FILE).write_text("\n".join(files.steps))

    RunCheckpoints.write, RunCheckpoints._publish = begin, end  # type: ignore[method-assign]


def newest_whole(checkpoints: Path) -> int:
    """Return the iteration of the newest checkpoint whose files match its manifest; 0 = none."""
    for checkpoint in RunStore(checkpoints).newest_first():
        try:
            entries = checkpoint.read().files
        except ValueError:
            continue
        roles = [checkpoint.path / name for name in ("actor", "critic")]
        damage = [problem for role in roles for problem in find_damage(role, role_entries(role))]
        if not damage + find_damage(checkpoint.path, entries):
            return checkpoint.iteration
    return 0


def main(models: Path, output: Path) -> None:
    whole, failed = output / "whole", RunDirectory(output / "failed")
    count = partial(with_failing_save, RunDirectory(whole).checkpoints, "")
    assert Forked(models, whole, False, count).wait() == 0
    steps = (whole / STEPS_FILE).read_text().splitlines()
    chosen = [step for step in choose_steps(steps) if step != "mkdir ."]  # of the first save only
    print(f"{len(chosen)} of {len(steps)} steps", flush=True)
    done = 0
    # Backwards: after the last step a whole checkpoint exists, which no other failure may damage.
    for number, failing in reversed(list(enumerate(chosen, 1))):
        first = partial(with_failing_save, failed.checkpoints, failing)
        status = Forked(models, failed.path, False, first).wait()
        newest = newest_whole(failed.checkpoints)
        print(f"{number} {failing}: exit status {status}, newest {newest}", flush=True)
        assert status == 1, "a run that cannot save must fail"
        assert newest >= max(done, 1), "an older checkpoint was lost or damaged"
        done = newest
    assert Forked(models, failed.path, False).wait() == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
