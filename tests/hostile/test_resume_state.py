"""Resume from a run directory whose checkpoint has lost files, or is of another version or run.

A small run is made once. Each case changes a copy of it, and gives the command again in a forked
process.
"""

import faulthandler
import json
import os
import shutil
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.checkpoint.store import MANIFEST, Manifest
from mindspeed_rlxf.cli.train import main
from mindspeed_rlxf.roles import actor, critic, reference, reward  # noqa: F401  # for the forks
from mindspeed_rlxf.weights.state_files import INDEX, entry_of
from tests.unit.trainer.test_bad_files import good

__all__ = ["good"]
ITERATION = 1
DRIVER, STREAMS = "trainer/state.json", "actor/random/rank_00000.json"


@dataclass(frozen=True)
class Ended:
    code: int  # negative: of a signal
    out: str
    err: str


def command(good: Path, iterations: int) -> Ended:
    """`train` in a forked process, without supervisor and Ray."""
    out, err = good / "out.txt", good / "err.txt"
    arguments = ["--config-dir", str(good), "--config-name", "good", "runtime.kind=local"]
    arguments += [f"training.train_iters={iterations}", "training.save_interval=1"]
    if (child := os.fork()) == 0:
        code = 1
        try:
            # The thread of pytest's own watchdog is not here, and would be waited for.
            faulthandler.dump_traceback_later = lambda *_, **__: None  # type: ignore[assignment]
            faulthandler.cancel_dump_traceback_later = lambda: None
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
            sys.stdout, sys.stderr = out.open("w"), err.open("w")
            os.dup2(sys.stdout.fileno(), 1)
            os.dup2(sys.stderr.fileno(), 2)
            code = main(arguments)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return Ended(os.waitstatus_to_exitcode(status), out.read_text(), err.read_text())


@pytest.fixture(scope="module")
def finished(good: Path) -> Path:
    """The run directory after an iteration, kept aside."""
    ended = command(good, ITERATION)
    assert ended.code == 0, ended.err
    shutil.rmtree(good / "run" / "final")
    return (good / "run").rename(good / "finished")


@pytest.fixture
def checkpoint(good: Path, finished: Path) -> Path:
    """The checkpoint of a fresh copy of the run, which a case changes and goes on with."""
    shutil.rmtree(good / "run", ignore_errors=True)
    shutil.copytree(finished, good / "run")
    return good / "run" / "checkpoints" / f"iter_{ITERATION:07d}"


def sign(checkpoint: Path) -> None:
    """Have the roles' indexes and the manifest tell of the files that are there."""
    for file in checkpoint.glob(f"*/{INDEX}"):
        index, role = json.loads(file.read_text()), file.parent
        index["files"] = [entry_of(role, role / entry["path"]) for entry in index["files"]]
        file.write_text(json.dumps(index))
    found = Manifest.from_json((checkpoint / MANIFEST).read_text())
    files = [entry_of(checkpoint, checkpoint / entry["path"]) for entry in found.files]
    (checkpoint / MANIFEST).write_text(Manifest(ITERATION, files, found.about).to_json())


def change(file: Path, path: tuple[str, ...], value: Any) -> None:
    """Give the value at `path` in a JSON file."""
    tree = inside = json.loads(file.read_text())
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    file.write_text(json.dumps(tree))


def refusal(good: Path) -> str:
    """The one error line of the command; no checkpoint has changed."""

    def listed() -> dict[Path, int]:
        return {p: p.stat().st_size for p in (good / "run" / "checkpoints").rglob("*")}

    before = listed()
    ended = command(good, ITERATION + 1)
    assert ended.code == 2 and "Traceback" not in ended.out, ended
    assert listed() == before
    (line,) = ended.err.splitlines()
    assert line.startswith("error: ") and "training.new_run=true" in line
    return line


def test_a_state_of_another_run_is_refused(good, checkpoint):
    change(checkpoint / DRIVER, ("trainer", "prompts", "sampler", "seed"), 5)
    sign(checkpoint)
    assert "use the seed of the saved run" in refusal(good)


@pytest.mark.long
def test_streams_of_another_kind_of_device_are_left(good, checkpoint):
    change(checkpoint / STREAMS, ("process", "device"), "00" * 16)
    change(checkpoint / STREAMS, ("megatron", "model-parallel-rng"), "00" * 16)
    sign(checkpoint)
    ended = command(good, ITERATION + 1)
    assert ended.code == 0 and "resumed from" in ended.out, ended.err
    assert "random streams of the ranks start from the seed" in ended.out
