"""A run that is killed again and again is the run that was not. `make chaos` has the long form."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from mindspeed_rlxf.reporting.run_dir import RunDirectory
from tests.chaos.forked import ITERATIONS
from tests.chaos.same_run import differences
from tests.distributed.conftest import REPOSITORY
from tests.distributed.test_resume import make_models

KILLS = 5


def test_five_kills_at_random_moments_change_nothing(tmp_path: Path) -> None:
    """In starts, iterations and saves, of which some are asynchronous."""
    models = make_models(tmp_path / "models")
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos.forked", models, tmp_path, "1", str(KILLS)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    killed = [line for line in done.stdout.splitlines() if line.startswith("killed: ")]
    assert len(killed) == KILLS, done.stdout
    runs = [RunDirectory(tmp_path / name) for name in ("whole", "killed")]
    assert differences(*runs, ITERATIONS) == []
