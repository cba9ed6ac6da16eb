"""Log metrics to trackers in a process of its own, and read back the files of each tracker."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Steps = dict[int, float]
ROOT = Path(__file__).parents[1]
SCORE = "critic/score/mean"
SECRET = "0123456789abcdef0123456789abcdef01234567"


def read_tensorboard(folder: Path) -> Steps:
    """Return step -> score of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {event.step: event.value for event in found.Scalars(SCORE)}


def wandb_records(folder: Path) -> Iterator[Any]:
    """Yield the records of all starts of a run, which `wandb sync` merges by the run's id."""
    from wandb.proto import wandb_internal_pb2 as records

    files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
    assert len({file.stem for file in files}) == 1, "all starts must write the same run id"
    for file in files:
        for data in leveldb_records(file.read_bytes()[7:]):  # after ":W&B" and the version
            record = records.Record()
            record.ParseFromString(data)
            yield record


def read_wandb(folder: Path) -> Steps:
    """Return step -> score of all starts of a run. Fails the test for a step recorded twice."""
    found: Steps = {}
    for record in wandb_records(folder):
        values = {i.key or "/".join(i.nested_key): i.value_json for i in record.history.item}
        if SCORE in values:
            step = int(values.get("_step", record.history.step.num))
            assert step not in found, "a step that was recorded twice"
            found[step] = float(values[SCORE])
    return found


def leveldb_records(data: bytes) -> list[bytes]:
    """Parse LevelDB's log format; return its records.

    Blocks of 32 KiB hold fragments of records, each after a header of crc, length and type. A type
    says whether a fragment is whole (1), first (2), middle (3) or last (4).
    """
    found, record, at = list[bytes](), b"", 0
    while at + 7 <= len(data):
        left = 32768 - (at + 7) % 32768  # the 7 bytes of the file's header belong to a block
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record = (record if kind in (3, 4) else b"") + data[at + 7 : at + 7 + length]
        if kind in (1, 4):
            found.append(record)
        at += 7 + length
    return found


def read_swanlab(folder: Path) -> Steps:
    """Return step -> score of all starts of a run, which `swanlab sync` merges by the run's id."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    found: Steps = {}
    files = sorted(folder.glob("run-*/*.swanlab"))
    assert len({file.stem for file in files}) == 1, "all starts must write the same run id"
    for file in files:
        reader = DataStoreReader()
        reader.open(file)
        for data in reader:
            record = Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "scalar" and record.scalar.key == SCORE:
                assert record.scalar.step not in found, "a step that was recorded twice"
                found[record.scalar.step] = record.scalar.value.number
    return found


READ: dict[str, Callable[[Path], Steps]] = {
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
    "swanlab": read_swanlab,
}

MAIN = """
import sys
from pathlib import Path
import psutil
from mindspeed_rlxf.reporting.trackers import TrackedRun, Trackers
folder, first, last = Path(sys.argv[2]), *map(int, sys.argv[3:])
run = TrackedRun("mine", "sums", "abc123", folder, {"training": {"seed": 7}}, True)
trackers = Trackers(sys.argv[1].split(","), run, lambda what, text: print("WARNING", text))
for i in range(first, last):
    trackers.log(i, {"critic/score/mean": i / 8, "other": 1.0, "wrong": float("nan")})
trackers.close()
print(*(f"LEFT {process.cmdline()}" for process in psutil.Process().children(recursive=True)))
"""


def start(names: str, folder: Path, first: int, last: int, home: Path) -> str:
    """Log iterations first to last - 1 to trackers, in a process of its own; return its output.

    names:   names of the trackers, joined by commas
    home:    home and working directory of the process
    """
    proxy = "http://127.0.0.1:9"  # nothing listens there, so the process has no network
    environment = {
        "PATH": "/usr/bin:/bin", "HOME": str(home), "PYTHONPATH": str(ROOT),
        "http_proxy": proxy, "https_proxy": proxy,
        "WANDB_API_KEY": SECRET, "SWANLAB_API_KEY": SECRET, "HF_TOKEN": f"hf_{SECRET}",
    }  # fmt: skip
    command = [sys.executable, "-c", MAIN, names, str(folder), str(first), str(last)]
    done = subprocess.run(
        command, env=environment, cwd=home, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def check_resumed_run(names: str, folder: Path) -> None:
    """Log iterations 1 to 5, then 4 to 7 after a resume from iteration 3, and read all back.

    Also checks that no process stays, nothing warns, and no key of the environment is written.
    """
    trackers, home = folder / "trackers", folder / "home"
    trackers.mkdir()
    home.mkdir()
    printed = start(names, trackers, 1, 6, home) + start(names, trackers, 4, 8, home)
    assert not any(word in printed for word in ("WARNING", "LEFT", SECRET)), printed
    for name in names.split(","):
        assert READ[name](trackers / name) == {i: i / 8 for i in range(1, 8)}
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert not [file for file in files if SECRET.encode() in file.read_bytes()]
