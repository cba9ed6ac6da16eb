"""Kills of the server, of workers and of the driver: the run goes on, and nothing is left."""

import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.processes import read_lines, start_logged, with_sources
from tests.vllm.tiny_runs import command, served_by

pytestmark = pytest.mark.vllm
KILLS = 4  # of a run
ITERATIONS = 3 + 4 * KILLS
AHEAD = {
    "placement__actor_rollout": "actor", "+resource_pool__actor": 2,
    "actor_rollout__num_gpus_for_train": 1, "actor_rollout__num_gpus_for_infer": 1,
    "rollout__max_staleness": 1,
}  # fmt: skip
PARTS = {
    **AHEAD, "rollout__max_staleness": 2, "rollout__slice_steps": 2,
    "actor_rollout__num_samples_per_step": 12,
}  # fmt: skip


def find(run: int, word: str) -> list[psutil.Process]:
    """The run's processes whose command line has the word."""
    found = []
    for process in psutil.Process(run).children(recursive=True):
        try:
            if word in " ".join(process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def victims(run: int, target: str) -> list[psutil.Process]:
    servers = find(run, "rlxf_serve.py")
    if target == "server":
        return servers[:1]
    starters = [parent for each in servers[:1] if (parent := each.parent())]
    if target == "worker":
        return starters
    if target == "trainer":
        return [each for each in find(run, "RayWorker") if servers and each not in starters][:1]
    return psutil.Process(run).children()[:1]


def left_behind(folder: Path, before: set[str]) -> list[str]:
    """Files in the run's folder for temporary files, its processes, and shared memory of nobody."""
    found = [str(path) for path in folder.glob("rlxf-vllm-*")]
    maps = ""
    for each in Path("/proc").glob("[0-9]*"):
        try:
            maps += (each / "maps").read_text(encoding="utf-8")
            if f"TMPDIR={folder}".encode() in (each / "environ").read_bytes():
                found.append((each / "cmdline").read_text(encoding="utf-8")[:100])
        except OSError:  # it has ended
            continue
    return found + [name for name in set(os.listdir("/dev/shm")) - before if name not in maps]


@pytest.mark.parametrize(
    ("targets", "placement"),
    [
        pytest.param(["server"] * KILLS, {}, id="server"),
        pytest.param(["worker"] * KILLS, {}, id="worker"),
        pytest.param(["driver"] * KILLS, {}, id="driver"),
        pytest.param(["server", "worker", "trainer", "driver"], AHEAD, id="generation ahead"),
        pytest.param(["server", "worker", "trainer", "driver"], PARTS, id="parts of responses"),
    ],
)
def test_a_run_goes_on_after_kills(
    vllm_python: str, model: Path, tmp_path: Path, targets: list[str], placement: dict[str, Any]
) -> None:
    before, out = set(os.listdir("/dev/shm")), tmp_path / "run"
    scratch = Path(tempfile.mkdtemp(prefix="kills-"))  # short, for paths of sockets
    keys: dict[str, Any] = {
        "actor_rollout__do_sample": "false", "training__train_iters": ITERATIONS,
        "training__save_interval": 1, "training__max_restarts": 9,
        **placement,
    }  # fmt: skip
    words = [sys.executable, *command(model, out, **keys, **served_by(vllm_python))]
    run = start_logged(
        words, tmp_path / "log", with_sources(RAY_ADDRESS="local", TMPDIR=str(scratch))
    )
    killed, seen = 0, 0
    try:
        while run.poll() is None:
            done = len(read_lines(out / "metrics.jsonl")) if (out / "metrics.jsonl").exists() else 0
            if killed < KILLS and done >= seen + 2:  # two in one iteration end the run
                time.sleep(0.3 * killed)  # at other moments of an iteration
                for process in victims(run.pid, targets[killed]):
                    process.send_signal(signal.SIGKILL)
                    killed, seen = killed + 1, done
            time.sleep(0.1)
        text = (tmp_path / "log").read_text(encoding="utf-8")
        assert (run.returncode, killed) == (0, KILLS), text[-3000:]
    finally:
        if run.poll() is None:
            os.kill(run.pid, signal.SIGKILL)
    lines = read_lines(out / "metrics.jsonl")
    assert [line["iteration"] for line in lines] == list(range(1, ITERATIONS + 1))
    restarts = [line for line in read_lines(out / "sync.jsonl") if line["restarted"]]
    assert bool(restarts) == ("server" in targets)
    samples = read_lines(out / "samples.jsonl")
    mixed = [s for s in samples if s["weights_version"][0] < s["weights_version"][1]]
    assert bool(mixed) == (placement is PARTS), "responses go on over a change of weights"
    ids = [sample["sample_id"] for sample in samples]
    assert ids == list(range(32 * ITERATIONS)), "each sample is trained once, in order"
    deadline = time.monotonic() + 30
    while left_behind(scratch, before) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert left_behind(scratch, before) == []
    shutil.rmtree(scratch)
