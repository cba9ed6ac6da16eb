"""A checkpoint of a run is whole or it is not one, and what is kept is read from the disk."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.run import store as run_store
from mindspeed_rlxf.run.store import MANIFEST, POINTER, Checkpoint, Manifest, RunStore
from mindspeed_rlxf.weights.state_files import (
    content_problem,
    entry_of,
    leaves_folder,
    under,
    write_text,
)


def save(store: RunStore, iteration: int, text: str = "weights") -> Path:
    hidden = store.begin(iteration)
    (hidden / "actor").mkdir()
    (hidden / "actor" / "w.distcp").write_text(text)
    entries = under("actor", [entry_of(hidden / "actor", hidden / "actor" / "w.distcp")])
    return store.commit(Manifest(iteration, entries, {"versions": {"torch": "2"}}))


def test_a_checkpoint_is_what_was_committed(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    folder = save(store, 10)
    manifest = Checkpoint(folder, 10).read()
    (entry,) = manifest.part("actor")
    digest = hashlib.sha256(b"weights").hexdigest()
    assert entry == {"path": "w.distcp", "size": 7, "sha256": digest}
    assert manifest.part("critic") == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000010", POINTER]
    assert (tmp_path / POINTER).read_text() == "10\n"


def missing(folder: Path) -> None:
    (folder / "actor" / "w.distcp").unlink()


def truncated(folder: Path) -> None:
    os.truncate(folder / "actor" / "w.distcp", 3)


def linked(folder: Path) -> None:
    (folder / "actor" / "w.distcp").rename(folder / "other")
    (folder / "actor" / "w.distcp").symlink_to(folder / "other")


def no_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def cut_manifest(folder: Path) -> None:
    os.truncate(folder / MANIFEST, 40)


def changed_manifest(folder: Path) -> None:
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text.replace('"size": 7', '"size": 8'))


def newer_format(folder: Path) -> None:
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text.replace('"format_version": 1', '"format_version": 2'))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (missing, "actor/w.distcp is missing"),
        (truncated, "actor/w.distcp has 3 bytes, not 7"),
        (linked, "actor/w.distcp is a link"),
        (no_manifest, "manifest.json is missing"),
        (cut_manifest, "manifest.json is not what was written"),
        (changed_manifest, r"manifest.json is not what was written \(sha256\)"),
        (newer_format, "has format_version 2, this version reads 1"),
    ],
)
def test_damage_is_named(damage: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    folder = save(RunStore(tmp_path), 1)
    damage(folder)
    with pytest.raises(ValueError, match=said):
        Checkpoint(folder, 1).read()


@pytest.mark.parametrize("files", [None, {}, ["x"], [{"size": 1}], [{"path": "a", "size": "1"}]])
def test_a_list_of_files_of_another_shape_is_damage(files: Any, tmp_path: Path) -> None:
    """Whatever wrote it, its sum is right."""
    store = RunStore(tmp_path)
    store.begin(1)
    folder = store.commit(Manifest(1, files, {}))
    with pytest.raises(ValueError, match=r"is not what was written \(its list of files\)"):
        Checkpoint(folder, 1).read()


def test_of_a_checkpoint_that_was_moved_and_linked_the_link_is_removed(tmp_path: Path) -> None:
    store, elsewhere = RunStore(tmp_path / "run"), tmp_path / "larger disk"
    for iteration in (1, 2):
        save(store, iteration)
    store.path(1).rename(elsewhere)
    store.path(1).symlink_to(elsewhere)
    (store.folder / ".iter_0000003").symlink_to(elsewhere)
    store.prune(1, 0)
    store.clear_unfinished()
    assert sorted(path.name for path in store.folder.glob("*iter*")) == ["iter_0000002", POINTER]
    assert (elsewhere / MANIFEST).exists(), "what somebody keeps is theirs to remove"


def test_a_flipped_bit_is_found_where_the_file_is_read(tmp_path: Path) -> None:
    folder = save(RunStore(tmp_path), 1)
    (entry,) = Checkpoint(folder, 1).read().files
    assert content_problem(folder, entry) is None
    (folder / "actor" / "w.distcp").write_text("weightr")
    assert content_problem(folder, entry) == "actor/w.distcp is not what was written (sha256)"


def test_a_folder_under_another_number_is_no_checkpoint(tmp_path: Path) -> None:
    folder = save(RunStore(tmp_path), 1)
    moved = folder.rename(tmp_path / "iter_0000002")
    with pytest.raises(ValueError, match="is of iteration 1"):
        Checkpoint(moved, 2).read()


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../x", "a/../../x", "", "a//b", "./a", "a\\b", "a\0b", None, 3]
)
def test_paths_that_leave_the_folder_are_refused(path: object, tmp_path: Path) -> None:
    assert leaves_folder(path)
    store = RunStore(tmp_path)
    store.begin(1)
    folder = store.commit(Manifest(1, [{"path": path, "size": 0, "sha256": ""}], {}))
    with pytest.raises(ValueError, match="outside its folder"):
        Checkpoint(folder, 1).read()


@pytest.mark.parametrize("path", ["a", "actor/__0_0.distcp", "actor/.metadata", "a..b/c"])
def test_plain_paths_are_taken(path: str) -> None:
    assert not leaves_folder(path)


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "best", "left"),
    [
        (2, 0, [], [7, 6]),
        (1, 3, [], [7, 6, 3]),
        (1, 0, [2], [7, 2]),
        (9, 0, [], [7, 6, 5, 4, 3, 2, 1]),
    ],
)
def test_what_is_kept_is_read_from_the_disk(
    keep_last: int, keep_every: int, best: list[int], left: list[int], tmp_path: Path
) -> None:
    for iteration in range(1, 8):
        save(RunStore(tmp_path), iteration)
    store = RunStore(tmp_path)  # as after a restart
    store.prune(keep_last, keep_every, best)
    assert [each.iteration for each in store.newest_first()] == left
    assert not list(tmp_path.glob(".iter_*"))


def test_what_a_killed_save_left_is_removed_by_the_next(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    (store.begin(4) / "actor").mkdir()
    (tmp_path / ".iter_0000001.removed").mkdir()
    (tmp_path / f".{POINTER}.123").touch()
    assert store.newest_first() == []
    save(store, 5)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000005", POINTER]


def test_an_older_folder_of_the_same_number_is_set_aside(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    save(store, 3, "before")
    save(store, 3, "after")
    assert (store.path(3) / "actor" / "w.distcp").read_text() == "after"
    aside = tmp_path / "iter_0000003.unused"
    assert (aside / "actor" / "w.distcp").read_text() == "before"
    assert [each.iteration for each in store.newest_first()] == [3]
    for iteration, left in ((4, True), (5, False)):
        assert aside.exists()
        save(store, iteration)
        store.prune(2, 3)
        assert aside.exists() is left, "until the two newest are later; iteration 3 is kept"
    assert [each.iteration for each in store.newest_first()] == [5, 4, 3]


class Synced:
    """What was on the disk: contents when last synced, by inode, and as they were when a name was
    given."""

    def __init__(self) -> None:
        self.now, self.at = dict[int, object](), dict[Path, dict[int, object]]()
        self._replace = os.replace

    def fsync(self, descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        self.now[path.stat().st_ino] = content(path)

    def replace(self, source: Path, target: Path) -> None:
        self._replace(source, target)
        self.at[target] = dict(self.now)


def content(path: Path) -> object:
    return sorted(os.listdir(path)) if path.is_dir() else path.read_bytes()


def test_all_of_a_checkpoint_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a host that loses power may have the name and not the files."""
    store, synced = RunStore(tmp_path), Synced()
    monkeypatch.setattr(os, "replace", synced.replace)
    monkeypatch.setattr(os, "fsync", synced.fsync)
    hidden = store.begin(4)
    (hidden / "actor" / "random").mkdir(parents=True)
    (hidden / "actor" / "w.distcp").write_text("weights")  # by a library, which does not sync it
    entries = under("actor", [entry_of(hidden / "actor", hidden / "actor" / "w.distcp")])
    for name in ("actor/random/rank_00000.json", "trainer/state.json"):
        write_text(hidden / name, "{}")
    final = store.commit(Manifest(4, entries, {}))
    lacking = [
        path.relative_to(final).as_posix()
        for path in (final, *final.rglob("*"))
        if synced.at[final].get(path.stat().st_ino) != content(path)
    ]
    assert len(list(final.rglob("*"))) == 7 and lacking == []
    pointer = tmp_path / POINTER  # which gets its name when the checkpoint's is on the disk
    assert final.name in str(synced.at[pointer][tmp_path.stat().st_ino])
    for path in (tmp_path, pointer):
        assert synced.now[path.stat().st_ino] == content(path)


WRITERS = [
    (run_store.os, "replace"),
    (run_store, "sync_folder"),
    (run_store, "write_text"),
]


@pytest.mark.parametrize("failing", range(12))
def test_whatever_step_fails_a_whole_checkpoint_is_found(
    failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every write, rename and sync of a second save fails in turn, as on a full disk."""
    save(RunStore(tmp_path), 1)
    calls = 0

    def shim(original: Callable[..., None]) -> Callable[..., None]:
        def wrapped(*arguments: object) -> None:
            nonlocal calls
            calls += 1
            if calls == failing + 1:
                raise OSError(28, "No space left on device")
            original(*arguments)

        return wrapped

    with monkeypatch.context() as patch:
        for module, name in WRITERS:
            patch.setattr(module, name, shim(getattr(module, name)))
        try:
            save(RunStore(tmp_path), 2)
            assert calls <= failing
        except OSError:
            assert calls == failing + 1
    newest = RunStore(tmp_path).newest_first()[0]
    assert [entry["path"] for entry in newest.read().files] == ["actor/w.distcp"]
    save(RunStore(tmp_path), 2)  # and the next save goes through
    assert RunStore(tmp_path).newest_first()[0].iteration == 2


def test_the_mark_of_an_export_names_its_iteration(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    assert store.exported() is None
    store.set_exported(7)
    assert store.exported() == 7
    store.clear_exported()
    assert store.exported() is None


def test_a_manifest_says_what_wrote_it(tmp_path: Path) -> None:
    folder = save(RunStore(tmp_path), 1)
    tree = json.loads((folder / MANIFEST).read_text())
    assert tree["format_version"] == 1 and tree["versions"] == {"torch": "2"}
