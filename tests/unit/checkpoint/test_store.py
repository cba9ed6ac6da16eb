"""Checkpoints on the disk: named when whole, checked when read, pruned."""

import contextlib
import hashlib
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mindspeed_rlxf.checkpoint import store as run_store
from mindspeed_rlxf.checkpoint.store import MANIFEST, POINTER, Checkpoint, Manifest, RunStore
from mindspeed_rlxf.weights.state_files import entry_of, under, write_text

WEIGHTS = "actor/w.distcp"


def save(store: RunStore, iteration: int, text: str = "weights") -> Path:
    file = store.begin(iteration) / WEIGHTS
    file.parent.mkdir()
    file.write_text(text)
    entries = under("actor", [entry_of(file.parent, file)])
    return store.commit(Manifest(iteration, entries, {"versions": {"torch": "2"}}))


def test_a_checkpoint_is_what_was_committed(tmp_path):
    store = RunStore(tmp_path)
    folder = save(store, 10)
    manifest = Checkpoint(folder, 10).read()
    (entry,) = manifest.files
    digest = hashlib.sha256(b"weights").hexdigest()
    assert entry == {"path": WEIGHTS, "size": 7, "sha256": digest}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000010", POINTER]
    assert (tmp_path / POINTER).read_text() == "10\n"


def replace(old: str, new: str) -> Callable[[Path], object]:
    def edit(file: Path) -> None:
        file.write_text(file.read_text().replace(old, new))

    return edit


@pytest.mark.parametrize(("name", "damage", "problem"), [
    (WEIGHTS, Path.unlink, "actor/w.distcp is missing"),
    (WEIGHTS, lambda file: os.truncate(file, 3), "actor/w.distcp has 3 bytes, not 7"),
    (MANIFEST, Path.unlink, "No such file"),
    (MANIFEST, lambda file: os.truncate(file, 40), "json differs from what was written"),
    (MANIFEST, replace('"size": 7', '"size": 8'), r"differs from what was written \(sha256\)"),
    (MANIFEST, replace('_version": 1', '_version": 2'), "has format_version 2, this version"),
])  # fmt: skip
def test_damage_is_named(name, damage, problem, tmp_path):
    folder = save(RunStore(tmp_path), 1)
    damage(folder / name)
    with pytest.raises((ValueError, FileNotFoundError), match=problem):
        Checkpoint(folder, 1).read()


def test_removing_a_linked_checkpoint_removes_the_link_alone(tmp_path):
    store, elsewhere = RunStore(tmp_path / "run"), tmp_path / "larger disk"
    for iteration in (1, 2):
        save(store, iteration)
    store.path(1).rename(elsewhere)
    store.path(1).symlink_to(elsewhere)
    (store.folder / ".iter_0000003").symlink_to(elsewhere)
    store.prune(1, 0)
    store.clear_unfinished()
    assert sorted(path.name for path in store.folder.glob("*iter*")) == ["iter_0000002", POINTER]
    assert (elsewhere / MANIFEST).exists(), "the user moved it there"


@pytest.mark.parametrize(("keep_last", "keep_every", "best", "left"), [
    (2, 0, None, [7, 6]), (1, 3, None, [7, 6, 3]), (1, 0, 2, [7, 2]),
    (9, 0, None, [7, 6, 5, 4, 3, 2, 1]),
])  # fmt: skip
def test_prune_keeps_the_newest_the_multiples_and_the_best(
    keep_last, keep_every, best, left, tmp_path, caplog
):
    for iteration in range(1, 8):
        save(RunStore(tmp_path), iteration)
    store = RunStore(tmp_path)  # as after a restart
    store.prune(keep_last, keep_every, best)
    assert [each.iteration for each in store.newest_first()] == left
    assert not list(tmp_path.glob(".iter_*"))
    assert not caplog.records, "a warning where everything was removed"


def test_the_next_save_removes_the_files_of_a_killed_one(tmp_path):
    store = RunStore(tmp_path)
    (store.begin(4) / "actor").mkdir()
    (tmp_path / ".iter_0000001.removed").mkdir()
    (tmp_path / f".{POINTER}.123").touch()
    assert store.newest_first() == []
    save(store, 5)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000005", POINTER]


def test_an_older_folder_of_the_same_iteration_is_set_aside(tmp_path):
    store = RunStore(tmp_path)
    save(store, 3, "before")
    save(store, 3, "after")
    assert (store.path(3) / WEIGHTS).read_text() == "after"
    aside = tmp_path / "iter_0000003.unused"
    assert (aside / WEIGHTS).read_text() == "before"
    assert [each.iteration for each in store.newest_first()] == [3]
    for iteration, left in ((4, True), (5, False)):
        assert aside.exists()
        save(store, iteration)
        store.prune(2, 3)
        assert aside.exists() is left, "until the two newest are later; iteration 3 is kept"
    assert [each.iteration for each in store.newest_first()] == [5, 4, 3]


class Synced:
    """Contents by inode when last synced, and what they were at each rename."""

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


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Otherwise a host that loses power could have the name without the files."""
    store, synced = RunStore(tmp_path), Synced()
    monkeypatch.setattr(os, "replace", synced.replace)
    monkeypatch.setattr(os, "fsync", synced.fsync)
    hidden = store.begin(4)
    (hidden / "actor" / "random").mkdir(parents=True)
    (hidden / WEIGHTS).write_text("weights")  # by a library that does not sync it
    entries = under("actor", [entry_of(hidden / "actor", hidden / WEIGHTS)])
    for name in ("actor/random/rank_00000.json", "trainer/state.json"):
        write_text(hidden / name, "{}")
    final = store.commit(Manifest(4, entries, {}))
    lacking = [
        path.relative_to(final).as_posix()
        for path in (final, *final.rglob("*"))
        if synced.at[final].get(path.stat().st_ino) != content(path)
    ]
    assert len(list(final.rglob("*"))) == 7 and lacking == []
    pointer = tmp_path / POINTER  # replaced after the checkpoint's name is on the disk
    assert final.name in str(synced.at[pointer][tmp_path.stat().st_ino])
    for path in (tmp_path, pointer):
        assert synced.now[path.stat().st_ino] == content(path)


WRITERS = [(run_store.os, "replace"), (run_store, "sync_folder"), (run_store, "write_text")]


@pytest.mark.parametrize("failing", range(12))
def test_a_save_that_fails_at_any_step_leaves_a_whole_checkpoint(failing, tmp_path, monkeypatch):
    """Every write, rename and sync of a second save fails in turn, as on a full disk."""
    save(RunStore(tmp_path), 1)
    calls = itertools.count()

    def failing_at(original: Callable[..., None]) -> Callable[..., None]:
        def wrapped(*arguments: object) -> None:
            if next(calls) == failing:
                raise OSError(28, "No space left on device")
            original(*arguments)

        return wrapped

    with monkeypatch.context() as patch:
        for module, name in WRITERS:
            patch.setattr(module, name, failing_at(getattr(module, name)))
        with contextlib.suppress(OSError):
            save(RunStore(tmp_path), 2)
            assert next(calls) <= failing, "a failure that was reached has to be raised"
    newest = RunStore(tmp_path).newest_first()[0]
    assert [entry["path"] for entry in newest.read().files] == ["actor/w.distcp"]
    save(RunStore(tmp_path), 2)  # the next save succeeds
    assert RunStore(tmp_path).newest_first()[0].iteration == 2
