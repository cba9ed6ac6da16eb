"""Resume from a run directory in which an attacker has changed the state of driver and ranks.

A small run is made once. Each case changes a file of its checkpoint, writes the new size and hash
into the manifest, and gives the command again in a forked process, which may crash.
"""

from __future__ import annotations

import faulthandler
import gzip
import json
import math
import os
import random
import resource
import shutil
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.cli.train import main
from mindspeed_rlxf.device.random_states import ProcessStreams, process_state
from mindspeed_rlxf.engine.train_state import _checked_numbers
from mindspeed_rlxf.roles import actor, critic, reference, reward  # noqa: F401  # for the forks
from mindspeed_rlxf.run.state_schema import read_driver_state
from mindspeed_rlxf.run.store import MANIFEST, Manifest
from mindspeed_rlxf.weights.state_files import entry_of
from tests.unit.trainer.test_bad_files import good

__all__ = ["good"]
SECONDS, BYTES = 5.0, 1 << 30  # of one case
ITERATION = 1
DRIVER, STREAMS, STEPS = "trainer/state.json", "actor/random/rank_00000.json", "actor/state.json"
HUGE = 10**400
ENDS = "put the files back, or set training.new_run=true"


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
    began = time.monotonic()
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
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    while not (done := os.wait4(child, os.WNOHANG))[0]:
        if time.monotonic() - began > 4 * SECONDS:  # of waiting, on a busy machine too
            os.kill(child, signal.SIGKILL)
        time.sleep(0.002)
    _, status, used = done
    assert used.ru_utime + used.ru_stime < SECONDS
    assert (used.ru_maxrss - before) * 1024 < BYTES
    return Ended(os.waitstatus_to_exitcode(status), out.read_text(), err.read_text())


@pytest.fixture(scope="module")
def finished(good: Path) -> Path:
    """The run directory after an iteration, kept aside."""
    ended = command(good, ITERATION)
    assert ended.code == 0, ended.err
    shutil.rmtree(good / "run" / "final")
    return (good / "run").rename(good / "finished")


@dataclass(frozen=True)
class Prepared:
    """A fresh copy of the run that a case changes and goes on with."""

    good: Path

    @property
    def checkpoint(self) -> Path:
        return self.good / "run" / "checkpoints" / f"iter_{ITERATION:07d}"

    def read(self, name: str) -> Any:
        return json.loads((self.checkpoint / name).read_text())

    def write(self, name: str, content: Any) -> None:
        """content: bytes, or what becomes JSON"""
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (self.checkpoint / name).write_bytes(data)

    def sign(self, change: Callable[[list[Any]], None] = lambda files: None) -> None:
        """Have the manifest tell of the files that are there. change: its list of files"""
        found = Manifest.from_json((self.checkpoint / MANIFEST).read_text(), MANIFEST)
        for entry in found.files:
            file = self.checkpoint / entry["path"]
            if file.is_file() and not file.is_symlink():
                entry |= entry_of(self.checkpoint, file)
        change(found.files)
        manifest = Manifest(found.iteration, found.files, found.about)
        (self.checkpoint / MANIFEST).write_text(manifest.to_json())

    def goes_on(self) -> Ended:
        """It is as if nothing had been changed: what came was data after all."""
        ended = command(self.good, ITERATION + 1)
        assert ended.code == 0 and "resumed from" in ended.out, ended.err
        return ended

    def is_refused(self, *names: str) -> str:
        """The one error line, with these words in it; nothing of the run has changed."""
        before = self.listed()
        ended = command(self.good, ITERATION + 1)
        assert ended.code == 2, ended
        (line,) = ended.err.splitlines()
        assert line.startswith("error: ") and len(line) <= 8007 and line.isprintable()
        assert "Traceback" not in ended.out
        assert DRIVER not in names or not ended.out, "before devices and roles"
        for name in names:
            assert name in line
        assert self.listed() == before
        return line

    def listed(self) -> dict[str, int]:
        folder = self.good / "run" / "checkpoints"
        return {p.relative_to(folder).as_posix(): p.lstat().st_size for p in folder.rglob("*")}


@pytest.fixture
def run(good: Path, finished: Path) -> Prepared:
    shutil.rmtree(good / "run", ignore_errors=True)
    shutil.copytree(finished, good / "run")
    return Prepared(good)


def put(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The tree with another value there; LEFT_OUT = with none."""
    if not path:
        return value
    inside = tree
    for key in path[:-1]:
        inside = inside[key]
    if value is LEFT_OUT:
        del inside[path[-1]]
    else:
        inside[path[-1]] = value
    return tree


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


LEFT_OUT = object()
VALUES: dict[str, Any] = {
    "left out": LEFT_OUT,
    "null": None,
    "a text": "1",
    "a long text": "\x1b[2J" * 10**5,
    "a list": [1],
    "an object": {"a": 1},
    "negative": -1,
    "64 bits": 1 << 64,
    "400 digits": HUGE,
    "a fraction": 0.5,
    "NaN": math.nan,
    "infinite": math.inf,
    "true": True,
    "nested 90 deep": json.loads(nested(90)),
}
DRIVER_PLACES = [
    (), ("iteration",), ("trainer",), ("trainer", "iteration"), ("trainer", "kl"),
    ("trainer", "kl", "value"), ("trainer", "prompts"), ("trainer", "prompts", "sampler"),
    *(("trainer", "prompts", "sampler", key)
      for key in ("epoch", "offset", "num_prompts", "seed", "shuffle")),
    ("trainer", "prompts", "next_sample_id"), ("positions",), ("positions", "metrics.jsonl"),
    ("prompts_digest",), ("score",),
]  # fmt: skip
STEP_PLACES = [
    (), ("optimizer_steps",), ("scheduler_steps",), ("skipped_in_a_row",), ("layout",),
    ("layout", "world_size"),
]  # fmt: skip
# Ordinary after all: another coefficient, no score, a score of a kind, records that are taken anew,
# other prompts, another layout.
HARMLESS = {
    *(("value", name) for name in ("negative", "a fraction", "64 bits")),
    *(("score", name) for name in ("left out", "null", "negative", "64 bits", "a fraction", "NaN",
                                   "infinite")),
    ("positions", "an object"), ("metrics.jsonl", "left out"), ("prompts_digest", "a text"),
    ("world_size", "left out"), ("layout", "an object"),
}  # fmt: skip


def is_harmful(place: tuple[Any, ...], name: str) -> bool:
    return (place[-1], name) not in HARMLESS if place else name != "left out"


def once_each(file: str, found: list[tuple[Any, ...]], short: list[int]) -> list[Any]:
    """Each place with another value. short: numbers of those that `make test` has"""
    made = []
    for number, place in enumerate(found):
        names = [name for name in VALUES if is_harmful(place, name)]
        marks = [] if number in short else [pytest.mark.long]
        name = names[5 * number % len(names)]
        made.append(pytest.param(file, place, name, marks=marks))
    return made


@pytest.mark.parametrize(
    ("file", "place", "name"),
    once_each(DRIVER, DRIVER_PLACES, [5, 8]) + once_each(STEPS, STEP_PLACES, [1]),
)
def test_a_value_of_another_kind_is_refused(
    run: Prepared, file: str, place: tuple[Any, ...], name: str
) -> None:
    run.write(file, put(run.read(file), place, VALUES[name]))
    run.sign()
    run.is_refused(file, ENDS)


@pytest.mark.parametrize(
    ("file", "place"),
    [(DRIVER, place) for place in DRIVER_PLACES] + [(STEPS, place) for place in STEP_PLACES],
)
def test_every_value_of_another_kind_is_refused_by_the_reader(
    finished: Path, tmp_path: Path, file: str, place: tuple[Any, ...]
) -> None:
    """The same without the command, for all of them."""
    text = (finished / "checkpoints" / f"iter_{ITERATION:07d}" / file).read_text()
    changed = tmp_path / "state.json"
    for name, value in VALUES.items():
        if not is_harmful(place, name):
            continue
        changed.write_text(json.dumps(put(json.loads(text), place, value)))
        with pytest.raises(ValueError) as error:
            if file == DRIVER:
                read_driver_state(changed, ITERATION)
            else:
                _checked_numbers(changed)
        assert str(changed) in str(error.value) and len(str(error.value)) < 1500


@pytest.mark.long
@pytest.mark.parametrize(
    ("place", "name"),
    [
        (place, name)
        for place in DRIVER_PLACES
        for name in VALUES
        if place and place[-1] != "prompts_digest" and not is_harmful(place, name)
    ],
)
def test_a_run_resumes_from_a_changed_but_valid_value(
    run: Prepared, place: tuple[Any, ...], name: str
) -> None:
    run.write(DRIVER, put(run.read(DRIVER), place, VALUES[name]))
    run.sign()
    run.goes_on()


TEXTS: dict[str, tuple[bytes, list[str]]] = {  # and for which files `make test` has it
    "nothing": (b"", []),
    "no UTF-8": (b"\xff\xfe{}", []),
    "no object": (b"[]", []),
    "cut short": (b'{"iteration": ', [DRIVER]),
    "5,000 digits": (b'{"iteration": ' + b"9" * 5000 + b"}", []),
    "a number alone": (b"NaN", []),
    "a megabyte of brackets": (b"[" * 10**6, []),
    "over the limit": (b" " * (33 << 20), []),
    "many keys": (json.dumps(dict.fromkeys(map(str, range(10**5)), 1)).encode(), []),
}


@pytest.mark.parametrize(
    ("file", "name"),
    [
        pytest.param(file, name, marks=[] if file in short else [pytest.mark.long])
        for file in (DRIVER, STREAMS, STEPS)
        for name, (_, short) in TEXTS.items()
    ],
)
def test_a_file_that_holds_no_state_is_refused(run: Prepared, file: str, name: str) -> None:
    run.write(file, TEXTS[name][0])
    run.sign()
    run.is_refused(Path(file).name, ENDS)


@pytest.mark.long
@pytest.mark.parametrize(
    ("file", "place"),
    [
        (DRIVER, ("more",)),
        (DRIVER, ("trainer", "more")),
        (DRIVER, ("trainer", "prompts", "sampler", "more")),
        (STREAMS, ("more",)),
        (STREAMS, ("process", "more")),
        (STREAMS, ("megatron", "more")),
        (STEPS, ("more",)),
    ],
)
def test_an_unknown_key_of_a_state_is_refused(
    run: Prepared, file: str, place: tuple[str, ...]
) -> None:
    run.write(file, put(run.read(file), place, 1))
    run.sign()
    run.is_refused(file, ENDS)


def pipe(file: Path, _: Path) -> None:
    os.mkfifo(file)


def device(file: Path, _: Path) -> None:
    file.symlink_to("/dev/zero")


def link(file: Path, elsewhere: Path) -> None:
    file.symlink_to(elsewhere)


def folder(file: Path, _: Path) -> None:
    file.mkdir()


def hole(file: Path, _: Path) -> None:
    file.touch()
    os.truncate(file, 40 << 20)


def nothing(file: Path, _: Path) -> None:
    assert not file.exists()


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        pytest.param(file, kind, marks=[] if (file, kind) == (DRIVER, pipe) else [pytest.mark.long])
        for file in (DRIVER, STREAMS, STEPS)
        for kind in (pipe, device, link, folder, hole, nothing)
    ],
)
def test_a_state_that_is_no_plain_file_is_refused(
    run: Prepared, file: str, kind: Callable[[Path, Path], None]
) -> None:
    """A link leads to the very file, elsewhere."""
    place, elsewhere = run.checkpoint / file, run.good / "elsewhere"
    place.rename(elsewhere)
    kind(place, elsewhere)
    run.sign()
    run.is_refused(Path(file).name, ENDS)


@pytest.mark.long
@pytest.mark.parametrize("kind", [pipe, nothing])
@pytest.mark.parametrize("file", [DRIVER, STREAMS, STEPS])
def test_a_file_that_no_manifest_names_is_refused_as_well(
    run: Prepared, file: str, kind: Callable[[Path, Path], None]
) -> None:
    """So nobody has looked at it before it is opened."""

    def forget(files: list[Any]) -> None:
        files[:] = [entry for entry in files if entry["path"] != file]

    (run.checkpoint / file).unlink()
    kind(run.checkpoint / file, run.good)
    run.sign(forget)
    run.is_refused(Path(file).name, ENDS)


# Random streams -----------------------------------------------------------------------------------

WORDS = 624
Streams = Callable[[dict[str, Any]], None]


def set_in(*path: Any, to: Any) -> Streams:
    return lambda state: put(state, path, to)


def torch_at(left: int, following: int, *path: str) -> Streams:
    """torch's generator goes on at that word, and makes new ones after `left` of them."""

    def change(state: dict[str, Any]) -> None:
        inside = state
        for key in path[:-1]:
            inside = inside[key]
        data = bytearray.fromhex(inside[path[-1]])
        struct.pack_into("<i", data, 8, left)
        struct.pack_into("<Q", data, 16, following)
        inside[path[-1]] = data.hex()

    return change


def cut(*path: str, by: int) -> Streams:
    """Leave out so many digits of a text, or values of a list; a negative number adds some."""

    def change(state: dict[str, Any]) -> None:
        inside: Any = state
        for key in path[:-1]:
            inside = inside[key]
        value = inside[path[-1]]
        inside[path[-1]] = value[:-by] if by > 0 else value + value[:-by]

    return change


TORCH = ("process", "torch")
TRACKED = ("megatron", "model-parallel-rng")
# The first ones make generators read memory that is not theirs.
OVERRUNS: dict[str, Streams] = {
    "numpy behind its words": set_in("process", "numpy", 1, to=10_000),
    "numpy one behind": set_in("process", "numpy", 1, to=WORDS + 1),
    "numpy before its words": set_in("process", "numpy", 1, to=-1000),
    "torch behind its words": torch_at(WORDS, WORDS, *TORCH),
    "torch one behind": torch_at(2, WORDS, *TORCH),
    "torch in the middle": torch_at(500, 500, *TORCH),
    "torch in 64 bits": torch_at(1, 1 << 32, *TORCH),
    "a stream of megatron": torch_at(WORDS, WORDS, *TRACKED),
    "Python behind its words": set_in("process", "python", 1, -1, to=WORDS + 1),
}
LIES: dict[str, Streams] = {
    **{f"torch of {k} left at {n}": torch_at(k, n, *TORCH) for k, n in ((0, 0), (-1, 0), (625, 0))},
    **{
        f"{name} {'shorter' if by > 0 else 'longer'} by {abs(by)}": cut(*path, by=by)
        for name, path in (("torch", TORCH), ("megatron", TRACKED))
        for by in (1, 2, 5000, -2, -5000)
    },
    "torch without digits": set_in(*TORCH, to=""),
    "torch of other digits": set_in(*TORCH, to="xy" * 5056),
    "torch of Arabic digits": set_in(*TORCH, to="\u0661" * 10112),
    "a device of no digits": set_in("process", "device", to="x"),
    "numpy of three parts": cut("process", "numpy", by=1),
    "numpy of five parts": cut("process", "numpy", by=-1),
    **{
        f"a word of numpy of {str(word)[:9]}": set_in("process", "numpy", 0, 5, to=word)
        for word in (-1, 1 << 32, HUGE, 1.5, "1", None, True, [1])
    },
    "few words of numpy": set_in("process", "numpy", 0, to=[1] * (WORDS - 1)),
    "many words of numpy": set_in("process", "numpy", 0, to=[1] * (WORDS + 1)),
    "words of numpy as text": set_in("process", "numpy", 0, to="1" * WORDS),
    **{
        f"numpy at {str(place)[:9]}": set_in("process", "numpy", 1, to=place)
        for place in (HUGE, 1.5, "1", True, None, 1 << 31)
    },
    **{
        f"numpy keeps {str(kept)[:9]}": set_in("process", "numpy", 2, to=kept)
        for kept in (2, -1, HUGE, "1", None)
    },
    **{
        f"numpy has kept {str(gauss)[:9]}": set_in("process", "numpy", 3, to=gauss)
        for gauss in (math.nan, math.inf, HUGE, "1", None, [1.0])
    },
    "Python of two parts": cut("process", "python", by=1),
    **{
        f"version {version} of Python's": set_in("process", "python", 0, to=version)
        for version in (2, 4, "3", True, -1)
    },
    "few words of Python": set_in("process", "python", 1, to=[1] * WORDS),
    "many words of Python": set_in("process", "python", 1, to=[1] * (WORDS + 2)),
    **{
        f"Python at {str(place)[:9]}": set_in("process", "python", 1, -1, to=place)
        for place in (-1, HUGE, 1.5, "1")
    },
    **{
        f"Python has kept {str(gauss)[:9]}": set_in("process", "python", 2, to=gauss)
        for gauss in (math.nan, "1", HUGE, [1.0], True)
    },
    **{
        f"{'.'.join(path)} is {name}": set_in(*path, to=VALUES[name])
        for path in (("process",), ("megatron",), TORCH, TRACKED, ("process", "numpy"),
                     ("process", "python"), ("process", "device"))
        for name in VALUES
        if (path[-1], name) != ("device", "null")
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if number == 0 else [pytest.mark.long])
        for number, name in enumerate([*OVERRUNS, *LIES])
    ],
)
def test_a_random_stream_with_impossible_values_is_refused(run: Prepared, name: str) -> None:
    state = run.read(STREAMS)
    (OVERRUNS | LIES)[name](state)
    run.write(STREAMS, state)
    run.sign()
    run.is_refused(STREAMS, ENDS)


def lies_of_the_process() -> list[str]:
    """Those that need no parallel groups to be seen."""
    process = process_state()
    sample = json.dumps({"process": process, "megatron": {TRACKED[1]: process["torch"]}})
    found = []
    for name, change in (OVERRUNS | LIES).items():
        state = json.loads(sample)
        change(state)
        if "process" in state and state["process"] != process:
            found.append(name)
    return found


@pytest.mark.parametrize("name", lies_of_the_process())
def test_the_reader_refuses_a_random_stream_with_impossible_values(name: str) -> None:
    """The same without the command; no stream has changed then."""
    before = process_state()
    state: dict[str, Any] = {"process": json.loads(json.dumps(before))}
    (OVERRUNS | LIES)[name](state)
    with pytest.raises(ValueError) as error:
        ProcessStreams.from_json(state["process"])
    assert len(str(error.value)) < 200 and process_state() == before


@pytest.mark.long
@pytest.mark.parametrize("seed", range(60))
def test_flipped_bytes_of_streams_end_in_a_line_or_in_other_numbers(
    run: Prepared, seed: int
) -> None:
    """Most of a stream are random digits, of which others are as good."""
    data, chance = bytearray((run.checkpoint / STREAMS).read_bytes()), random.Random(seed)
    ends = [2 * n for n in (8, 12, 16, 20)] if seed % 2 else [len(data)]
    start = data.index(b'"torch": "') + 10 if seed % 2 else 0
    for _ in range(chance.choice([1, 3, 30])):
        data[start + chance.randrange(min(chance.choice(ends), len(data)))] = chance.randrange(256)
    run.write(STREAMS, bytes(data))
    run.sign()
    ended = command(run.good, ITERATION + 1)
    assert ended.code in (0, 2), ended
    assert "Traceback" not in ended.out + ended.err
    if ended.code == 2:
        (line,) = ended.err.splitlines()
        assert line.startswith("error: ") and STREAMS in line and ENDS in line


# What follows is right in its form, and wrong for this run ----------------------------------------


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("trainer", "prompts", "sampler", "seed"), 5, "use the seed of the saved run"),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (
                (("trainer", "prompts", "sampler", "num_prompts"), 9, "use the num_prompts"),
                (("trainer", "prompts", "sampler", "shuffle"), 0, "use the shuffle of"),
                (("prompts_digest",), "0" * 64, "must give the prompts of the run"),
                (("positions", "metrics.jsonl"), 1 << 53, "the checkpoint counts 9007199254740992"),
            )
        ),
    ],
)
def test_a_state_of_another_run_is_refused(
    run: Prepared, place: tuple[str, ...], value: Any, words: str
) -> None:
    run.write(DRIVER, put(run.read(DRIVER), place, value))
    run.sign()
    ended = command(run.good, ITERATION + 1)
    (line,) = ended.err.splitlines()
    assert ended.code == 2 and line.startswith("error: ") and words in line
    assert "training.new_run=true" in line and "Traceback" not in ended.out


@pytest.mark.parametrize("file", [DRIVER, pytest.param(STREAMS, marks=pytest.mark.long)])
def test_a_run_resumes_from_the_checkpoint_before_a_bad_one(run: Prepared, file: str) -> None:
    """As where the disk has damaged the newest one."""
    newer = run.checkpoint.with_name(f"iter_{ITERATION + 1:07d}")
    shutil.copytree(run.checkpoint, newer)
    manifest = Manifest.from_json((newer / MANIFEST).read_text(), MANIFEST)
    state = run.read(DRIVER) | {"iteration": ITERATION + 1}
    state["trainer"] |= {"iteration": ITERATION + 1}
    (newer / DRIVER).write_text(json.dumps(state))
    (newer / file).write_bytes(b"{}")
    for entry in manifest.files:
        entry |= entry_of(newer, newer / entry["path"])
    signed = Manifest(ITERATION + 1, manifest.files, manifest.about)
    (newer / MANIFEST).write_text(signed.to_json())
    said = run.goes_on().out
    assert f"warning: {newer}" in said and "resuming from an older checkpoint" in said
    assert f"resumed from {run.checkpoint}" in said


@pytest.mark.long
def test_streams_of_another_kind_of_device_are_left(run: Prepared) -> None:
    state = run.read(STREAMS)
    state["process"]["device"] = state["megatron"][TRACKED[1]] = "00" * 16
    run.write(STREAMS, state)
    run.sign()
    assert "random streams of the ranks start from the seed" in run.goes_on().out


@pytest.mark.long
def test_a_run_resumes_from_an_unchanged_checkpoint(run: Prepared) -> None:
    run.sign()
    run.goes_on()


def part_of_two_bytes(run: Path) -> None:
    (run / "metrics.jsonl.1.gz").write_bytes(b"ab")


def part_that_is_a_folder(run: Path) -> None:
    (run / "metrics.jsonl.1.gz").mkdir()


def part_of_zeros(run: Path) -> None:
    """It says that it has all lines that the checkpoint has seen."""
    size = (run / "metrics.jsonl").stat().st_size
    (run / "metrics.jsonl.1.gz").write_bytes(bytes(20) + (2 * size).to_bytes(4, "little"))


def part_cut_short(run: Path) -> None:
    data = gzip.compress(random.Random(1).randbytes(10**6))
    size = (run / "metrics.jsonl").stat().st_size
    (run / "metrics.jsonl.1.gz").write_bytes(data[:40] + (2 * size).to_bytes(4, "little"))


def records_without_end(run: Path) -> None:
    (run / "samples.jsonl").unlink()
    (run / "samples.jsonl").symlink_to("/dev/zero")


RECORDS = [part_of_two_bytes, part_that_is_a_folder, part_of_zeros, part_cut_short]


@pytest.mark.long
@pytest.mark.parametrize("change", [*RECORDS, records_without_end])
def test_records_that_are_none_are_refused(run: Prepared, change: Callable[[Path], None]) -> None:
    change(run.good / "run")
    ended = command(run.good, ITERATION + 1)
    assert ended.code == 2 and "Traceback" not in ended.out, ended
    (line,) = ended.err.splitlines()
    assert line.startswith("error: ") and "; " in line
