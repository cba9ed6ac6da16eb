"""The supervisor starts a stand-in for the training command, which follows a plan."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.checkpoint.supervised import CHILD_OF
from mindspeed_rlxf.config.compose import compose
from mindspeed_rlxf.ops import supervisor
from mindspeed_rlxf.ops.supervisor import Failure, Restarts, Supervisor, supervise

ROOT = Path(__file__).parents[3]
STAND_IN = """
import json, os, signal, sys, time
from pathlib import Path
from mindspeed_rlxf.ops.supervisor import supervise
from mindspeed_rlxf.checkpoint.supervised import find_command_start, report_facts
assert supervise() is None
folder = Path(sys.argv[1])
with open(folder / "attempts.jsonl", "a") as file:
    file.write(json.dumps(sys.argv[2:]) + "\\n")
number = len(open(folder / "attempts.jsonl").readlines()) - 1
step = json.load(open(folder / "plan.json"))[number]
assert find_command_start() > 0
if "locked" in step:
    import fcntl
    own = os.open(Path(os.environ["RLXF_SUPERVISOR"].split(":", 2)[2]).parent, os.O_RDONLY)
    try:
        fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(step["locked"])
if "facts" in step:
    report_facts(directory=str(folder), **step["facts"])
if "saved" in step:
    (folder / "checkpoints").mkdir(exist_ok=True)
    (folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(step["saved"])
if "facts" in step:  # as a run does before it reports its directory
    (folder / "failure.json").unlink(missing_ok=True)
if "failure" in step:
    (folder / "failure.json").write_text(json.dumps(step["failure"]))
if "kill" in step:
    os.kill(os.getpid(), step["kill"])
if "wait" in step:
    def handler(n, frame):
        (folder / "signal").write_text(str(n))
        sys.exit(step["exit"])
    signal.signal(signal.SIGTERM, handler)
    signal.signal(signal.SIGHUP, handler)
    (folder / "ready").write_text("")
    time.sleep(60)
sys.exit(step["exit"])
"""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
FACTS = {"max_restarts": 3, "stop_grace_s": 60.0, "node_wait_s": 7.0}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    before = [(number, signal.getsignal(number)) for number in STOP_SIGNALS]
    yield
    for number, handler in before:
        signal.signal(number, handler)


def make(folder: Path, *plan: dict[str, Any]) -> Supervisor:
    (folder / "plan.json").write_text(json.dumps(plan))
    return Supervisor([sys.executable, "-S", "-c", STAND_IN, str(folder)])


def attempts(folder: Path) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "attempts.jsonl").read_text().splitlines()]


def again(folder: Path) -> list[str]:
    """What a restart adds to the command."""
    return ["training.new_run=false", "training.resume=auto", f"training.output_dir='{folder}'"]


def failed(iteration: int, error: str, **more: Any) -> dict[str, Any]:
    failure = {"iteration": iteration, "error": error, "cause": f"{time.time()} MiB are free"}
    return {"exit": 1, "facts": FACTS, "failure": failure, **more}


RESTARTED = "restart: 1 of 3 (training.max_restarts), from the checkpoint of iteration 3\n"
TWICE = "no restart: it failed twice in iteration 4 with the same cause\n"


@pytest.mark.parametrize(
    ("plan", "code", "num_attempts", "line"),
    [
        ([{"exit": 0, "facts": FACTS}], 0, 1, ""),
        ([{"locked": 75, "exit": 0}], 75, 1, ""),  # against those who empty /tmp
        ([{"exit": 2, "facts": FACTS}], 2, 1, ""),
        ([{"exit": 75, "facts": FACTS}], 75, 1, ""),
        ([{"kill": signal.SIGSEGV}], 1, 1, "failed: driver: killed by SIGSEGV\n"),
        ([failed(4, "x", saved="3"), {"exit": 0}], 0, 2, RESTARTED),
        ([failed(4, "x"), failed(4, "x"), {"exit": 0}], 1, 2, TWICE),
        ([failed(4, "x"), {"exit": 2}, {"exit": 2}, {"exit": 0}], 0, 4, ""),
        ([failed(4, "x"), *[{"exit": 2}] * 3, {"exit": 0}], 1, 4, ""),
        ([failed(4, "x", facts={**FACTS, "no_restart": "a rule"})], 1, 1, "no restart: a rule\n"),
        ([failed(4, "x"), {"exit": 75, "facts": FACTS}], 75, 2, ""),  # no nodes for lost ones
    ],
)
def test_an_end_is_final_or_followed_by_the_same_command(
    tmp_path, capfd, plan, code, num_attempts, line
):
    """line: the last one on stderr"""
    assert make(tmp_path, *plan).run() == code
    assert attempts(tmp_path) == [[], *[again(tmp_path)] * (num_attempts - 1)]
    assert capfd.readouterr().err.endswith(line)


def test_a_training_process_that_is_killed_is_reported_and_replaced(tmp_path, capfd):
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 3}\n{"iteration": 4}\n{"itera')
    killed = {"facts": FACTS, "kill": signal.SIGKILL}
    assert make(tmp_path, killed, {"exit": 0}).run() == 0
    assert "failed: driver: killed by SIGKILL" in capfd.readouterr().err
    found = json.loads((tmp_path / "failure.json").read_text())
    assert (found["role"], found["iteration"], found["error"]) == ("driver", 5, "killed by SIGKILL")


def test_a_restart_on_a_joined_cluster_waits_for_good_nodes(tmp_path):
    lost = failed(4, "died", facts={**FACTS, "joined": True})
    assert make(tmp_path, lost, {"exit": 0}).run() == 0
    waits = ["++resource_pool.wait_s=7.0", "++resource_pool.bad_nodes=exclude"]
    assert attempts(tmp_path) == [[], again(tmp_path) + waits]


@pytest.mark.parametrize(
    "name", ["lr=1e-5", "a,b (v2) [x]", "it's", "50%\\x", "\\'", "x\\\\", "Übung 学"]
)
def test_a_restart_finds_a_directory_whatever_its_name_is(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    assert make(folder, failed(4, "x", saved="3"), {"exit": 0}).run() == 0
    tree = compose("ppo_trainer_tiny", ["training.output_dir=x", *attempts(folder)[1]])
    assert tree["training"]["output_dir"] == str(folder)


TERM, HUP = signal.SIGTERM, signal.SIGHUP


@pytest.mark.parametrize(
    ("code", "expected", "number"),
    [(75, 75, TERM), (-1, 75, TERM), (1, 1, TERM), (0, 0, TERM), (75, 75, HUP)],
)
def test_a_signal_is_forwarded_and_nothing_is_restarted(tmp_path, code, expected, number):
    run = make(tmp_path, {"facts": FACTS, "wait": True, "exit": code})

    def signal_when_ready() -> None:
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=signal_when_ready)
    thread.start()
    assert run.run() == expected
    thread.join()
    assert (tmp_path / "signal").read_text() == str(int(number))


def test_the_training_process_dies_with_its_supervisor(tmp_path):
    make(tmp_path, {"facts": FACTS, "wait": True, "exit": 0})
    code = (
        "import sys; from mindspeed_rlxf.ops.supervisor import Supervisor\n"
        "Supervisor([sys.executable, '-S', '-c', *sys.argv[1:]]).run()"
    )
    parent = subprocess.Popen([sys.executable, "-S", "-c", code, STAND_IN, str(tmp_path)])
    deadline = time.monotonic() + 30
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    parent.kill()
    parent.wait()
    while any(Path(f"/proc/{pid}/cwd").exists() for pid in children):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    "words",
    [
        ["--cfg", "job"], ["--help"], ["dry_run=true"], ["+dry_run=True"], ["runtime=local"],
        ["training.max_restarts=0"], ["WORLD_SIZE"],
    ],
)  # fmt: skip
def test_ranks_of_torchrun_and_commands_without_restarts_run_in_the_process_itself(
    words, monkeypatch
):
    monkeypatch.setattr(Supervisor, "run", lambda self: 12)
    monkeypatch.delenv(CHILD_OF, raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(sys, "argv", ["ray_gpt.py", "--config-name", "x"])
    assert supervise() == 12
    if words == ["WORLD_SIZE"]:
        monkeypatch.setenv("WORLD_SIZE", "2")
    else:
        monkeypatch.setattr(sys, "argv", [*sys.argv, *words])
    assert supervise() is None


def test_restarts_are_counted_from_the_newest_checkpoint():
    counted = Restarts()
    seen = [
        counted.decide(Failure(iteration, (iteration,), saved), 2)[0]
        for iteration, saved in [(1, 0), (2, 0), (3, 2), (4, 2), (5, 2)]
    ]
    assert seen == [True, True, True, True, False]
    assert counted.decide(Failure(6, (6,), 2), 2)[1] == (
        "training.max_restarts=2 are used up since the last checkpoint"
    )
    assert Restarts().decide(Failure(1, (), 0), 0) == (False, "")
    back = Restarts()  # the newest checkpoint was damaged: the one before is no progress
    assert back.decide(Failure(5, (5,), 4), 1)[0]
    assert not back.decide(Failure(3, (3,), 2), 1)[0]
    again = Restarts()
    again.decide(Failure(3, ("x",), 2), 9)
    assert again.decide(Failure(4, ("x",), 2), 9)[0]  # another iteration
    assert again.decide(Failure(4, ("y",), 2), 9)[0]  # another cause


def test_pauses_grow_until_there_is_a_newer_checkpoint(monkeypatch):
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 5.0)
    counted, pauses = Restarts(), list[float]()
    for number in range(8):
        counted.decide(Failure(number, None, 0), 99)
        pauses.append(counted.pause_s)
    assert pauses == [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0]
    counted.decide(Failure(9, ("x",), 9), 99)
    assert counted.pause_s == 5.0


@pytest.mark.parametrize("module", ["mindspeed_rlxf.ops.supervisor", "mindspeed_rlxf.cli"])
def test_the_supervising_process_imports_the_standard_library_only(module):
    code = (
        f"import sys, {module}\n"
        "found = {n.partition('.')[0] for n in sys.modules} - set(sys.stdlib_module_names)\n"
        "print(*sorted(n for n in found if not n.startswith('_')))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["mindspeed_rlxf"]
