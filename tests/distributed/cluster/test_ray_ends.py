"""A cluster that a driver started ends with it; a cluster that it joined stays unharmed."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE
from typing import Any

import psutil
import pytest

from tests.distributed.cluster.group_checks import build
from tests.distributed.cluster.stand_ins import StandIn
from tests.processes import ROOT

SOCKET_BYTES = 107  # of the path of a unix socket
ASK = "import sys; from mindspeed_rlxf.cluster.ray.cluster import asks_for_token as asks; "
ASK += "print(asks(sys.argv[1]))"


def asks_for_token(address: str) -> bool:
    """Ask in a process without tokens."""
    environment = {n: v for n, v in os.environ.items() if not n.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", ASK, address],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return done.stdout.strip() == "True"


def test_no_other_user_enters_an_own_cluster(ray_runtime: Any) -> None:
    folder = ray_runtime.cluster.temp_dir
    found = folder.lstat()
    assert stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    assert stat.S_IMODE(found.st_mode) == 0o700
    sockets = [path for path in folder.rglob("*") if stat.S_ISSOCK(path.lstat().st_mode)]
    assert {path.name for path in sockets} >= {"raylet", "plasma_store"}  # Ray works in there
    assert max(len(os.fsencode(path)) for path in sockets) <= SOCKET_BYTES
    assert list(folder.rglob("logs/raylet.out"))
    assert asks_for_token(ray_runtime.cluster.address)


@contextmanager
def driver(**environment: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.distributed.cluster.ray_driver"]
    own = {**os.environ, **environment}
    # A process group of its own, as a terminal gives it.
    process = subprocess.Popen(
        command, stdout=PIPE, stderr=PIPE, text=True, cwd=ROOT, env=own, start_new_session=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def next_facts(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What the driver says when its worker is busy."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the driver ended early: {process.communicate()[1]}"
    facts: dict[str, Any] = json.loads(line)
    return facts


@pytest.mark.parametrize(
    "signals",
    [[signal.SIGKILL], pytest.param([signal.SIGINT, signal.SIGKILL], marks=pytest.mark.long)],
    ids=["kill", "interrupt, then kill"],
)
def test_nothing_of_an_own_cluster_is_left(signals: list[signal.Signals]) -> None:
    with driver(RAY_ADDRESS="local", RAY_AUTH_MODE="disabled") as process:
        for number in signals:
            facts = next_facts(process)
            assert asks_for_token(facts["address"])  # the mode is for clusters to join
            children = psutil.Process(process.pid).children(recursive=True)
            assert facts["own"]
            assert facts["worker"] in {child.pid for child in children}
            # Ctrl-C reaches the whole group, a kill the driver alone.
            os.killpg(process.pid, number) if number == signal.SIGINT else process.kill()
            _, alive = psutil.wait_procs(children, timeout=20)
            assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
            wait_until_gone(Path(facts["temp_dir"]))
        assert process.communicate()[1] == ""


def wait_until_gone(folder: Path) -> None:
    deadline = time.monotonic() + 10
    while folder.exists():
        assert time.monotonic() < deadline, f"{folder} is left"
        time.sleep(0.05)


def test_a_joined_cluster_is_left_as_it_was(ray_runtime: Any) -> None:
    address = ray_runtime.cluster.address
    secret = "joined-canary-61c3"
    forwarded = {"NCCL_RLXF_TEST": "on", "NCCL_RLXF_TOKEN": secret}
    with driver(RAY_ADDRESS=address, **forwarded) as process:
        facts = next_facts(process)
        assert not facts["own"] and facts["forwarded"] == "on" and facts["secret"] == secret
        files = [p for p in ray_runtime.cluster.temp_dir.rglob("logs/**/*") if p.is_file()]
        texts = {path: path.read_bytes() for path in files}
        assert any(b"NCCL_RLXF_TEST" in text for text in texts.values())  # Ray logs what it sets
        assert [path for path, text in texts.items() if secret.encode() in text] == []
        worker = psutil.Process(facts["worker"])
        assert worker not in psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.communicate()
        worker.wait(timeout=20)
    pool = ray_runtime.create_pools({"after": [1]})["after"]
    assert build(pool).call(StandIn.rank).result() == [(0, 1)]
    pool.shutdown()
    pool.shutdown()  # a second time does nothing
