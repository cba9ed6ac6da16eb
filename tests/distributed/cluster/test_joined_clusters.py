"""A run joins a Ray that was started by the commands of the documents, ours and older ones."""

import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.golden.runs import PPO, SMALL
from tests.processes import ROOT, free_port

RAY = [sys.executable, "-m", "ray.scripts.scripts"]
START_S = 60.0
JOIN = """
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stdout)
from mindspeed_rlxf.config.problems import UserError
from mindspeed_rlxf.cluster.ray.cluster import open_cluster
try:
    open_cluster(None, {}).close()
except UserError as error:
    print(f"error: {error}")
"""
# MindSpeed-LLM's guide, with CPU stand-ins for the NPUs.
HEAD = """ray start --head --port 6344 --dashboard-host=0.0.0.0 --dashboard-port=8260
          --resources '{"NPU": 8}'"""
SECOND = """ray start --address=HEAD:6344 --resources '{"NPU": 8}'"""
TRAIN = "python ray_gpt.py --config-name ppo_trainer_tiny"
CHANGES = {
    **SMALL, **PPO, "training.train_iters": 1, "resource_pool.main": "[1,1]",
    "device.resource_name": "NPU",
}  # fmt: skip

pytestmark = pytest.mark.long


def documented(document: str, marks: str) -> str:
    """Return the line of a document that starts with `marks`."""
    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    lines = [line.partition("  #")[0] for line in text.splitlines()]
    return next(line for line in lines if line.startswith(marks))


@contextmanager
def running(line: str, environment: dict[str, str], output: Path) -> Iterator[None]:
    """Run the command of the line in the foreground; Ray ends with it."""
    words = [*RAY, *shlex.split(line)[1:], "--block", "--num-cpus=1", "--disable-usage-stats"]
    with open(output, "w") as stream:
        process = subprocess.Popen(words, env=environment, stdout=stream, stderr=stream)
    children: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + START_S
        while "--block" not in output.read_text():  # its last line of output
            assert process.poll() is None, output.read_text()
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.2)
        children = psutil.Process(process.pid).children(recursive=True)
        yield
    finally:
        process.terminate()
        process.wait(timeout=60)
        for child in psutil.wait_procs(children, timeout=5)[1]:
            child.kill()


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """Of a user without a token; at the end of the test nothing of their Ray is left."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="d") as home:  # sockets: a short path
        own = {name: v for name, v in os.environ.items() if not name.startswith("RAY_")}
        yield {**own, "HOME": home, "RAY_TMPDIR": home, "PYTHONPATH": str(ROOT)}
        left = [p for p in psutil.process_iter(["environ"]) if of_home(p, home)]
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=10)


def of_home(process: psutil.Process, home: str) -> bool:
    return (process.info["environ"] or {}).get("RAY_TMPDIR") == home


def join(environment: dict[str, str]) -> str:
    words = [sys.executable, "-c", JOIN]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr and done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("document", ["nodes_and_failures.md", "npu.md"])
def test_the_commands_of_the_documents_start_a_cluster_with_tokens(environment, tmp_path, document):
    port = str(free_port())
    line = documented(document, "ray start --head").replace("6344", port)
    line = line.replace("8260", str(free_port()))
    make = documented("nodes_and_failures.md", "(umask 077; ray get-auth-token").replace(
        "ray ", f"{shlex.join(RAY)} "
    )
    subprocess.run(["bash", "-c", make], env=environment, check=True, timeout=60)
    token = Path(environment["HOME"], ".ray", "auth_token")
    assert token.stat().st_mode & 0o077 == 0
    with running(line, {**environment, "RAY_AUTH_MODE": "token"}, tmp_path / "head"):
        printed = join(environment)
        assert "INFO joined the Ray cluster at" in printed and "WARNING" not in printed
        other = {**environment, "RAY_AUTH_TOKEN": "another", "RAY_ADDRESS": f"127.0.0.1:{port}"}
        (refused,) = [line for line in join(other).splitlines() if line.startswith("error: ")]
        assert "must be that of a running Ray cluster" in refused


def test_a_listener_that_is_not_ray_is_refused_within_a_minute(environment: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        printed = join({**environment, "RAY_ADDRESS": address})
    assert printed.startswith(
        f"error: runtime.address={address} must be that of a running Ray cluster"
    )
    assert len(printed.splitlines()) == 1
    assert time.monotonic() - began < 80  # Ray waits for 40


def test_the_commands_of_the_older_guide_train(environment: dict[str, str], tmp_path: Path) -> None:
    port = str(free_port())
    more = [f"{key}={value}" for key, value in CHANGES.items()]
    more.append(f"training.output_dir={tmp_path / 'run'}")
    # The ports of the guide may be in use here; the second host is this one.
    head = HEAD.replace("6344", port).replace("8260", str(free_port()))
    second = SECOND.replace("HEAD:6344", f"127.0.0.1:{port}")
    for line, program, extra in (
        (head, RAY, ["--num-cpus=1"]),
        (second, RAY, ["--num-cpus=1"]),
        (TRAIN, [sys.executable], more),
    ):
        words = [*program, *shlex.split(line)[1:], *extra]
        done = subprocess.run(
            words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert "joined the Ray cluster" in done.stdout
    assert "done: 1 iterations" in done.stdout
