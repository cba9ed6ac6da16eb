"""A run that is killed and restarted several times equals an undisturbed one.

`make chaos` does the same with many kills of whole runs under Ray.
"""

import re
from pathlib import Path

import pytest

from mindspeed_rlxf.checkpoint.directory import RunDirectory
from tests.chaos.forked import ITERATIONS
from tests.chaos.same_run import differences
from tests.distributed.llamas import PLAIN, make_models
from tests.forks import Forks

KILLS = 3
OF_ROLES = ["config.json", "state.json", "state_00000.safetensors"]
SYNCED = [  # fsync of each file after its last write, and of each folder after its last new name
    *(f".iter/{role}/{file}" for role in ("actor", "critic") for file in OF_ROLES),
    *(f".iter/{role}/random/rank_00000.json" for role in ("actor", "critic")),
    *(f".iter/{role}/random (time 2)" for role in ("actor", "critic")),
    *(
        f".iter/{role}/.{file}.TMP"
        for role in ("actor", "critic")
        for file in ("index_00000.json", "index.json")
    ),
    *(".iter/actor (time 7)", ".iter/critic (time 6)"),
    ".iter/trainer (time 3)",
    *(f".iter/trainer/{file}" for file in ("state.json", "config.yaml")),
    *(".iter/.manifest.json.TMP", ".iter", ".", ".latest_checkpointed_iteration.txt.TMP"),
]


def forked(forks: Forks, module: str, folder: Path, *arguments: str) -> str:
    """Run a module of `tests.chaos`, which leaves its runs in the folder; return its output."""
    models = make_models(folder / "models", PLAIN)
    return forks.run(f"tests.chaos.{module}", models, folder, *arguments, megatron=True)


def test_three_kills_at_random_moments_change_nothing(forks: Forks, tmp_path: Path) -> None:
    """The moments are in starts, iterations, and synchronous and asynchronous saves."""
    said = forked(forks, "forked", tmp_path, "1", str(KILLS))
    assert len([line for line in said.splitlines() if line.startswith("killed: ")]) == KILLS, said
    runs = [RunDirectory(tmp_path / name) for name in ("whole", "killed")]
    assert differences(*runs, ITERATIONS) == []


@pytest.mark.long
def test_a_run_resumes_after_a_failure_at_any_step_of_a_save(forks: Forks, tmp_path: Path) -> None:
    """The steps are every open, fsync and rename, and the 1st, 2nd, 4th, ... and last write of each
    file."""
    said = forked(forks, "failing_saves", tmp_path)
    (steps,) = map(int, re.findall(r"^(\d+) of \d+ steps$", said, re.MULTILINE))
    failed = [line for line in said.splitlines() if "exit status 1, newest" in line]
    assert len(failed) == steps > 80, said
    for word in ("fsync .iter/actor/", "open .iter/", "of .iter/critic/state_00000.", "replace "):
        assert any(word in line for line in failed), word
    for name in SYNCED:
        assert any(f" fsync {name}: exit status" in line for line in failed), name
    runs = [RunDirectory(tmp_path / name) for name in ("whole", "failed")]
    assert differences(*runs, ITERATIONS) == []
