"""A run that is killed again and again is the run that was not. `make chaos` has the long form."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_rlxf.run.directory import RunDirectory
from tests.chaos.forked import ITERATIONS
from tests.chaos.same_run import differences
from tests.distributed.conftest import REPOSITORY
from tests.distributed.llamas import PLAIN, make_models

KILLS = 5
OF_ROLES = ["config.json", "state.json", "state_00000.safetensors"]
SYNCED = [  # files when they are whole, folders when all names are in them
    *(f".iter/{role}/{file}" for role in ("actor", "critic") for file in OF_ROLES),
    *(f".iter/{role}/random/rank_00000.json" for role in ("actor", "critic")),
    *(f".iter/{role}/random (time 2)" for role in ("actor", "critic")),
    *(f".iter/{folder} (time 3)" for folder in ("actor", "critic", "trainer")),
    *(f".iter/trainer/{file}" for file in ("state.json", "config.yaml")),
    *(".iter/.manifest.json.TMP", ".iter", ".", ".latest_checkpointed_iteration.txt.TMP"),
]


def forked(module: str, folder: Path, *arguments: str) -> str:
    """What a module of `tests.chaos` printed; it leaves `whole` and another run in the folder."""
    models = make_models(folder / "models", PLAIN)
    done = subprocess.run(
        [sys.executable, "-m", f"tests.chaos.{module}", models, folder, *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_five_kills_at_random_moments_change_nothing(tmp_path: Path) -> None:
    """In starts, iterations and saves, of which some are asynchronous."""
    said = forked("forked", tmp_path, "1", str(KILLS))
    assert len([line for line in said.splitlines() if line.startswith("killed: ")]) == KILLS, said
    runs = [RunDirectory(tmp_path / name) for name in ("whole", "killed")]
    assert differences(*runs, ITERATIONS) == []


@pytest.mark.long
def test_whichever_step_of_a_save_fails_a_whole_checkpoint_is_found_and_gone_on_from(
    tmp_path: Path,
) -> None:
    """Every open, sync and rename in turn, and of a file's writes the 1st, 2nd, 4th, ... and the
    last."""
    said = forked("failing_saves", tmp_path)
    (steps,) = map(int, re.findall(r"^(\d+) of \d+ steps$", said, re.MULTILINE))
    failed = [line for line in said.splitlines() if "ended with 1, newest" in line]
    assert len(failed) == steps > 80, said
    for word in ("fsync .iter/actor/", "open .iter/", "of .iter/critic/state_00000.", "replace "):
        assert any(word in line for line in failed), word
    for name in SYNCED:
        assert any(f" fsync {name}: ended" in line for line in failed), name
    runs = [RunDirectory(tmp_path / name) for name in ("whole", "failed")]
    assert differences(*runs, ITERATIONS) == []
