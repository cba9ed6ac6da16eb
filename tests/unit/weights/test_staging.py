"""A folder is published at once, and a process that is killed while publishing loses nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.cli import convert
from mindspeed_rlxf.cli.convert import main
from mindspeed_rlxf.config.errors import UserError
from mindspeed_rlxf.weights.staging import StagedFolder
from tests.unit.weights.folders_of import assert_same, make_folder, read_folder

REPOSITORY = Path(__file__).resolve().parents[3]
PLAN = {"of": "this test"}
OTHER = {"plan": {"of": "another test"}}
USERS = {"deep/mine.pt": "of the user"}  # in a folder whose name looks like one of ours
OLD = {"a.pt": "old a", "c/old.pt": "old c"}
NEW = {"a.pt": "new a", "b/b.pt": "new b", "side.json": "{}"}
PARTS = ("a.pt", "b/b.pt")
STEPS = ("replace", "unlink", "rmdir", "fsync", "rename", "truncate")


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the package catches it."""


@contextmanager
def killed_after(last: int) -> Iterator[list[str]]:
    """Ends after so many calls of the system that change names or reach the disk; 0 = not."""
    made: list[str] = []

    def counted(name: str) -> Any:
        real = getattr(os, name)

        def step(*arguments: Any, **keywords: Any) -> Any:
            result = real(*arguments, **keywords)
            made.append(name)
            if len(made) == last:
                raise Killed
            return result

        return step

    with pytest.MonkeyPatch.context() as patch:
        for name in STEPS:
            patch.setattr(os, name, counted(name))
        yield made


def fill(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def content(folder: Path) -> dict[str, str]:
    """Of a finished folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_text() for path in files}


def staged(target: Path, replace: bool, rewritten: list[str] | None = None) -> StagedFolder:
    """All parts written, those that are not there already; their names go to `rewritten`."""
    folder = StagedFolder(target, PLAN, replace)
    for part in PARTS:
        if not folder.is_finished(part):
            folder.write(part, partial(fill, files={part: NEW[part]}))
            if rewritten is not None:
                rewritten.append(part)
    folder.write_beside(partial(fill, files={"side.json": NEW["side.json"]}))
    return folder


def number_of_steps(tmp_path: Path, before: dict[str, str], stale: bool) -> int:
    target = tmp_path / "counted" / "mg"
    folder = prepared(target, before, stale)
    with killed_after(0) as made:
        folder.publish()
    assert content(target) == NEW
    return len(made)


def prepared(target: Path, before: dict[str, str], stale: bool) -> StagedFolder:
    fill(target, before)
    if stale:
        fill(target.with_name("mg.replaced"), USERS)
    return staged(target, replace=bool(before))


@pytest.mark.parametrize(
    ("before", "stale"),
    [({}, False), (OLD, False), (OLD, True)],
    ids=["nothing there", "replacing", "replacing, beside a folder of the user"],
)
def test_an_interrupted_publish_is_finished_by_the_same_command(
    tmp_path: Path, before: dict[str, str], stale: bool
) -> None:
    """After every step that the system sees, in turn: no part is written again."""
    steps = number_of_steps(tmp_path, before, stale)
    assert steps >= (8 if before else 3)
    for last in range(1, steps + 1):
        target = tmp_path / str(last) / "mg"
        folder = prepared(target, before, stale)
        with pytest.raises(Killed), killed_after(last):
            folder.publish()
        folder.close()  # as the system does
        rewritten: list[str] = []
        if list(target.parent.rglob("journal.jsonl")):  # else all was done
            staged(target, bool(before), rewritten).publish()
        assert (rewritten, content(target)) == ([], NEW), last
        there = ["mg", "mg.replaced"] if stale else ["mg"]
        assert sorted(path.name for path in target.parent.iterdir()) == there, last
        assert not stale or content(target.with_name("mg.replaced")) == USERS, last


def test_a_killed_replacement_leaves_the_old_folder_or_the_new_one(tmp_path: Path) -> None:
    """Whoever does not say --force again, or wants other parts, finds one of them whole."""
    for last in range(1, number_of_steps(tmp_path, OLD, False) + 1):
        target = tmp_path / str(last) / "mg"
        folder = prepared(target, OLD, False)
        with pytest.raises(Killed), killed_after(last):
            folder.publish()
        folder.close()
        with pytest.raises(UserError, match="must not exist yet"):
            StagedFolder(target, {"of": "another"}, replace=False)
        assert content(target) in (OLD, NEW), last
        assert not list(target.parent.glob("mg.replaced*")), last


@pytest.mark.parametrize("before", [{}, OLD], ids=["nothing there", "replacing"])
def test_a_folder_of_the_user_with_a_name_like_ours_is_kept(
    tmp_path: Path, before: dict[str, str]
) -> None:
    prepared(tmp_path / "mg", before, stale=True).publish()
    assert content(tmp_path / "mg") == NEW and content(tmp_path / "mg.replaced") == USERS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mg", "mg.replaced"]


def test_a_link_is_replaced_and_what_it_leads_to_is_kept(tmp_path: Path) -> None:
    fill(tmp_path / "elsewhere", OLD)
    for name in ("elsewhere", "gone"):
        (tmp_path / "mg").symlink_to(tmp_path / name)
        with pytest.raises(UserError, match="must not exist yet"):
            StagedFolder(tmp_path / "mg", PLAN, replace=False)
        staged(tmp_path / "mg", replace=True).publish()
        assert content(tmp_path / "mg") == NEW and not (tmp_path / "mg").is_symlink()
        (tmp_path / "mg" / "side.json").unlink()
        for part in PARTS:
            (tmp_path / "mg" / part).unlink()
        (tmp_path / "mg" / "b").rmdir()
        (tmp_path / "mg").rmdir()
    assert content(tmp_path / "elsewhere") == OLD


def test_a_foreign_journal_file_is_treated_as_content(tmp_path: Path) -> None:
    for text in ("no json", "[1]\n", '{"plan"', '{"other": 1}\n'):
        fill(tmp_path / "mg", {"journal.jsonl": text})
        with pytest.raises(UserError, match="must not exist yet"):
            StagedFolder(tmp_path / "mg", PLAN, replace=False)
        assert content(tmp_path / "mg") == {"journal.jsonl": text}
    staged(tmp_path / "mg", replace=True).publish()
    assert content(tmp_path / "mg") == NEW


def test_parts_noted_after_a_line_that_was_cut_off_are_found(tmp_path: Path) -> None:
    target, journal = tmp_path / "mg", tmp_path / "mg.partial" / "journal.jsonl"
    folder = StagedFolder(target, PLAN, replace=False)
    for part in PARTS:
        folder.write(part, partial(fill, files={part: NEW[part]}))
    folder.close()
    head, start, _ = journal.read_bytes().partition(b'{"part": "b/b.pt"')
    journal.write_bytes(head + start)  # cut off in the line of the second part
    rewritten: list[str] = []
    staged(target, False, rewritten).close()
    assert rewritten == ["b/b.pt"] and journal.read_bytes().startswith(head)
    assert staged(target, False, rewritten).kept.keys() == set(PARTS) and len(rewritten) == 1


def test_a_part_whose_bytes_have_changed_is_written_again(tmp_path: Path) -> None:
    staged(tmp_path / "mg", replace=False).close()
    part = tmp_path / "mg.partial" / PARTS[0]
    part.write_text(part.read_text().swapcase())  # as many bytes
    rewritten: list[str] = []
    staged(tmp_path / "mg", False, rewritten).publish()
    assert rewritten == [PARTS[0]] and content(tmp_path / "mg") == NEW


def test_a_folder_that_is_being_published_is_not_taken_over(tmp_path: Path) -> None:
    folder = staged(tmp_path / "mg", replace=False)
    with pytest.raises(Killed), killed_after(1):  # it has its name; the writer is alive
        folder.publish()
    assert (tmp_path / "mg" / "journal.jsonl").exists()
    with pytest.raises(UserError, match="is being written by another process"):
        StagedFolder(tmp_path / "mg", PLAN, replace=False)
    folder.close()


KILLED_AT_A_NAME = """
import os, signal, sys
from mindspeed_rlxf.cli.convert import main
replace, end = os.replace, sys.argv.pop()
def killed(source, target):
    replace(source, target)
    if end in str(target):
        os.kill(os.getpid(), signal.SIGKILL)
os.replace = killed
main(sys.argv[1:])
"""


def test_the_command_killed_between_two_names_ends_when_it_is_given_again(
    tmp_path: Path, capsys: Any
) -> None:
    tensors = make_folder(tmp_path / "hf", "llama")
    arguments = [str(tmp_path / "hf"), str(tmp_path / "mg"), "--to", "mg"]
    assert main(arguments) == 0
    arguments += ["--tp", "2", "--force"]
    command = [sys.executable, "-c", KILLED_AT_A_NAME, *arguments, "mg.replaced-"]
    killed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, timeout=240)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left[:2] == ["hf", "mg.partial"] and left[2].startswith("mg.replaced-"), left
    capsys.readouterr()
    assert main(arguments) == 0
    assert "GB that an earlier run wrote, after verifying them" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "mg"]
    assert main([str(tmp_path / "mg"), str(tmp_path / "back"), "--to", "hf"]) == 0
    assert_same(read_folder(tmp_path / "back"), tensors)


def test_the_command_killed_between_two_files_keeps_the_first(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "GB", 1)
    tensors = make_folder(tmp_path / "hf", "llama")
    arguments = [str(tmp_path / "hf"), str(tmp_path / "mg"), "--to", "mg", "--tp", "2"]
    second = "mp_rank_01/model_optim_rng.pt"
    command = [sys.executable, "-c", KILLED_AT_A_NAME, *arguments, second]
    killed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, timeout=240)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "mg.partial"]
    # The first stands in the journal. The second has its name, and nobody has vouched for it.
    (first,) = (tmp_path / "mg.partial").rglob("mp_rank_00/*.pt")
    was, size = first.stat().st_ino, first.stat().st_size
    (cut,) = (tmp_path / "mg.partial").rglob(second)
    cut.write_bytes(cut.read_bytes()[:-1])
    assert main(arguments) == 0
    said = capsys.readouterr()
    assert "GB that an earlier run wrote, after verifying them" in said.out
    done, _, total = said.err.split()[:3]  # two ranks of one size, the first is there
    assert float(total) == 2 * float(done) > 0
    (kept,) = (tmp_path / "mg").rglob("mp_rank_00/*.pt")
    assert (kept.stat().st_ino, kept.stat().st_size) == (was, size)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "mg"]
    assert main([str(tmp_path / "mg"), str(tmp_path / "back"), "--to", "hf"]) == 0
    assert_same(read_folder(tmp_path / "back"), tensors)


def test_files_that_the_journal_does_not_name_are_kept_and_reported(tmp_path: Path) -> None:
    """Parts of an older plan go; what a user put beside them is not removed or published."""
    staged(tmp_path / "mg", replace=False).close()
    partial_folder = tmp_path / "mg.partial"
    fill(partial_folder, {"notes/mine.txt": "x"})
    for plan in (PLAN, {"of": "another"}):
        with pytest.raises(UserError, match="no conversion wrote: notes; remove or rename it"):
            StagedFolder(tmp_path / "mg", plan, replace=False)
    assert (partial_folder / "notes" / "mine.txt").read_text() == "x"
    (partial_folder / "notes" / "mine.txt").rename(tmp_path / "mine.txt")
    (partial_folder / "notes").rmdir()
    StagedFolder(tmp_path / "mg", {"of": "another"}, replace=False).close()
    assert [path.name for path in partial_folder.iterdir()] == ["journal.jsonl"]


@pytest.mark.parametrize(
    "line",
    [
        {"begins": "../mine"}, {"begins": "kept"}, {"begins": "out/mine"}, {"begins": "."},
        {"part": "/etc/hosts"},
        {"replaces": "mine"}, {"replaces": "../mine"}, {"replaces": 5},
        {"replaces": "mg.replaced"}, {"replaces": "mg.replaced", "node": [1, 2]},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("place", ["mg", "mg.partial"])
def test_a_journal_of_a_stranger_removes_nothing_outside_its_folder(
    tmp_path: Path, line: dict[str, Any], place: str
) -> None:
    others = ("mine", "elsewhere/mine", "mg.replaced")
    for folder in others:
        fill(tmp_path / folder, {"a": "x"})
    fill(tmp_path / place, {"journal.jsonl": "".join(json.dumps(x) + "\n" for x in (OTHER, line))})
    (tmp_path / place / "out").symlink_to(tmp_path / "elsewhere")
    fill(tmp_path / place / "kept", {"a": "x"})
    with contextlib.suppress(UserError):
        StagedFolder(tmp_path / "mg", PLAN, replace=True).close()
    for folder in others:
        assert content(tmp_path / folder) == {"a": "x"}, folder
    assert content(tmp_path / "mg.partial" / "kept" if place == "mg.partial" else tmp_path / "mine")
    assert Path("/etc/hosts").exists()


@pytest.mark.parametrize("name", ["mg.partial", "mg.partial/journal.jsonl"])
def test_a_link_in_place_of_our_folder_or_journal_is_an_error(tmp_path: Path, name: str) -> None:
    fill(tmp_path / "elsewhere", {"journal.jsonl": "mine"} if name == "mg.partial" else {})
    (tmp_path / "mine").write_text("mine")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).symlink_to(tmp_path / ("elsewhere" if name == "mg.partial" else "mine"))
    with pytest.raises(UserError, match="remove or rename it"):
        StagedFolder(tmp_path / "mg", PLAN, replace=False)
    assert (tmp_path / "mine").read_text() == "mine"
    assert (tmp_path / "elsewhere").exists() is (name == "mg.partial")


def test_a_target_that_appears_during_the_writing_is_not_replaced(tmp_path: Path) -> None:
    folder = staged(tmp_path / "mg", replace=False)
    fill(tmp_path / "mg", USERS)
    with pytest.raises(UserError, match="must not exist yet"):
        folder.publish()
    assert content(tmp_path / "mg") == USERS
