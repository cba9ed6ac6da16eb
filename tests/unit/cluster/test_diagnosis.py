"""The logs of late ranks say which of them the others wait for."""

import subprocess
import sys
import time
from pathlib import Path

from mindspeed_rlxf.cluster.errors import Origin, RuntimeTimeout, explain_timeout, read_stack

WORKER = """
import sys, time
from mindspeed_rlxf.cluster.errors import stacks_when_late
def hang(seconds):
    time.sleep(seconds)
with stacks_when_late(100):
    hang(0)
with stacks_when_late(0.1):
    hang(float(sys.argv[1]))
print("after", file=sys.stderr)
"""


def frames(*names: str) -> str:
    """A stack dump as faulthandler writes it, the innermost frame first."""
    lines = [f'  File "/x/{name.rpartition(":")[0]}", line 1 in {name.rpartition(":")[2]}\n'
             for name in names]  # fmt: skip
    other = 'Thread 0x1 (most recent call first):\n  File "/x/threading.py", line 1 in wait\n\n'
    return f"{other}Current thread 0x2 (most recent call first):\n{''.join(lines)}"


HOST = ("mindspeed_rlxf/cluster/worker.py:run", "default_worker.py:<module>")
WAITS = frames("torch/distributed/distributed_c10d.py:all_reduce", *HOST)
BUSY = frames("json/decoder.py:decode", "mindspeed_rlxf/rewards/rules.py:score", *HOST)
IDLE = frames("default_worker.py:<module>")


def test_a_late_call_writes_its_stacks_until_it_has_ended(tmp_path: Path) -> None:
    for seconds, is_late in ((600.0, True), (0.3, False)):
        log = tmp_path / f"{seconds}.log"
        with open(log, "wb") as stream:
            process = subprocess.Popen([sys.executable, "-c", WORKER, str(seconds)], stderr=stream)
        wanted, deadline = ("in hang" if is_late else "after"), time.monotonic() + 30
        while wanted not in log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert ("in hang" in read_stack(str(log))) == is_late
        process.kill()
        process.wait()


def ranks(folder: Path, call: str, *stacks: str) -> list[Origin]:
    """Ranks of a call, with these stacks in their logs."""
    found = []
    role, phase = call.split(".")
    for rank, stack in enumerate(stacks):
        log = folder / f"{role}_{rank}.log"
        log.write_text(f"some output\nTimeout (0:00:27)!\n{stack}" if stack else "")
        found.append(Origin(role, rank, f"host{rank}", phase, str(log)))
    return found


def late(*missing: int) -> RuntimeTimeout:
    return RuntimeTimeout("critic.values", 30, missing)


def test_ranks_that_wait_for_others_are_not_the_ones_that_did_not_arrive(tmp_path: Path) -> None:
    for stacks, missing, state in (
        ([WAITS, WAITS, ""], [2], "no stack in its log"),  # stopped, or gone
        ([WAITS, BUSY, WAITS], [1], "in rules.score (innermost frame: decode)"),
        ([WAITS, IDLE], [1], "no call to work on"),
        ([WAITS, WAITS], [0, 1], "waiting for others in a collective"),
    ):
        origins = ranks(tmp_path, "critic.values", *stacks)
        found = explain_timeout(late(0, 1, 2), origins, dict.fromkeys(origins, False))
        assert (found.missing, found.role) == (missing, "critic")
        assert found.hosts == [f"host{rank}" for rank in missing]
        assert found.hint.startswith(state)


def test_ranks_that_wait_for_rows_name_the_rank_that_makes_them(tmp_path: Path) -> None:
    """Also through a rank that waits for rows itself; both have no call that could have a stack."""
    waits = [*ranks(tmp_path, "critic.values", ""), *ranks(tmp_path, "ref.log_probs", "")]
    makers = ranks(tmp_path, "actor.generate", WAITS, BUSY)
    lacks_rows = {**dict.fromkeys(waits, True), **dict.fromkeys(makers, False)}
    found = explain_timeout(late(0), waits[:1], lacks_rows)
    assert (found.what, found.missing) == ("actor.generate", [1])
