"""A growing file in parts loses and repeats no line, whenever the process is killed."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.reporting import line_file
from mindspeed_rlxf.reporting.line_file import LineFile
from mindspeed_rlxf.reporting.metrics import Sample, SampleWriter

LINES = [b"line %02d\n" % number for number in range(12)]  # 8 bytes each
SIZE = 8


def filled(folder: Path) -> LineFile:
    """Twelve lines: two compressed parts of four and of one, seven in the file itself."""
    file = LineFile(folder / "x.jsonl", SIZE)
    for number, line in enumerate(LINES):
        if number in (4, 5):
            assert file.rotate()
        with open(file.path, "ab") as stream:
            stream.write(line)
    return file


def test_full_files_become_parts_and_lines_keep_their_order(tmp_path: Path) -> None:
    file = filled(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["x.jsonl", "x.jsonl.1.gz", "x.jsonl.2.gz"]
    assert gzip.decompress((tmp_path / "x.jsonl.1.gz").read_bytes()) == b"".join(LINES[:4])
    assert list(file.lines()) == LINES
    assert file.position() == len(LINES) * SIZE
    assert not LineFile(file.path, 7 * SIZE + 1).rotate(), "not full yet"
    assert not LineFile(file.path).rotate(), "no limit"


@pytest.mark.parametrize("lines", range(13))
def test_a_cut_leaves_just_the_first_bytes_whichever_part_they_end_in(
    tmp_path: Path, lines: int
) -> None:
    file = filled(tmp_path)
    with open(file.path, "ab") as appender:
        file.cut(lines * SIZE)
        assert list(file.lines()) == LINES[:lines] and file.position() == lines * SIZE
        appender.write(b"after\n")
    assert list(file.lines()) == [*LINES[:lines], b"after\n"], "who appends goes on"


def test_a_cut_beyond_the_end_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    file = filled(tmp_path)
    with pytest.raises(ValueError, match=r"must have the 97 bytes .* it has 96; put it back"):
        file.cut(97)
    assert list(file.lines()) == LINES
    with pytest.raises(ValueError, match="it has 0"):
        LineFile(tmp_path / "none").cut(1)
    LineFile(tmp_path / "none").cut(0)
    assert not LineFile(tmp_path / "none").exists()


class Killed(BaseException):
    pass


STEPS = [
    (line_file.os, "replace"),
    (line_file.os, "fsync"),
    (line_file.gzip, "GzipFile"),
    (line_file.shutil, "copyfileobj"),
    (Path, "unlink"),
    (Path, "rename"),
]


def kill_at(monkeypatch: Any, number: int) -> list[int]:
    """From now on the call with that number, of all that change files, kills the process."""
    calls = [0]

    def guarded(original: Any) -> Any:
        def call(*args: Any, **keywords: Any) -> Any:
            calls[0] += 1
            if calls[0] == number:
                raise Killed
            return original(*args, **keywords)

        return call

    for owner, name in STEPS:
        monkeypatch.setattr(owner, name, guarded(getattr(owner, name)))
    return calls


@pytest.mark.parametrize("number", range(1, 9))
def test_a_kill_while_a_part_is_made_loses_no_line_and_doubles_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    file = filled(tmp_path)
    with monkeypatch.context() as patched:
        calls = kill_at(patched, number)
        try:
            file.rotate()
        except Killed:
            pass
        else:
            assert calls[0] == number - 1 == 7, "every step has had its kill"
    assert list(file.lines()) == LINES and file.position() == len(LINES) * SIZE
    with open(file.path, "ab") as stream:
        stream.write(b"after, long enough for a part of its own\n")
    assert file.rotate()
    assert list(file.lines()) == [*LINES, b"after, long enough for a part of its own\n"]
    assert all(path.suffix == ".gz" for path in tmp_path.iterdir() if path.is_file())


@pytest.mark.parametrize("number", range(1, 7))
def test_a_kill_while_cutting_leaves_what_the_next_cut_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    file = filled(tmp_path)
    with monkeypatch.context() as patched:
        calls = kill_at(patched, number)
        try:
            file.cut(2 * SIZE)
        except Killed:
            pass
        else:
            assert calls[0] < number, "every step has had its kill"
    file.cut(2 * SIZE)
    assert list(file.lines()) == LINES[:2]


def test_the_sample_writer_goes_on_in_a_new_file(tmp_path: Path) -> None:
    sample = Sample(1, "p", "r", [1], [2], 0.5, {}, (0, 0))
    writer = SampleWriter(tmp_path / "samples.jsonl", "all", file_bytes=150)
    for iteration in (1, 2, 3):
        writer.write(iteration, [sample, sample])  # about 200 bytes
    writer.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "samples.jsonl",
        *(f"samples.jsonl.{n}.gz" for n in (1, 2, 3)),
    ]
    assert len(list(LineFile(tmp_path / "samples.jsonl").lines())) == 6
    SampleWriter(Path(os.devnull), "all", file_bytes=1).write(1, [sample])
    assert Path(os.devnull).exists()
