"""Checkpoints of hosts that share no folder: written apart, committed together, fetched."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_rlxf.cluster.host_agent import Function, HostCall
from mindspeed_rlxf.config.enums import RuntimeKind
from mindspeed_rlxf.config.errors import UserError
from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.run import host_files
from mindspeed_rlxf.run.checkpoints import PROBE, RunCheckpoints
from mindspeed_rlxf.run.directory import RunDirectory
from mindspeed_rlxf.run.host_files import HostView
from mindspeed_rlxf.run.store import POINTER, Checkpoint, RunStore
from mindspeed_rlxf.weights.state_files import HOST, Loaded, Written, entry_of
from tests.unit.cluster.agents import InProcess
from tests.unit.config.conftest import make_tree, no_cluster
from tests.unit.run.runs import Answer, MakeTree, trainer_state

__all__ = ["make_tree", "no_cluster"]
NewCluster = Callable[..., "Cluster"]


class Machine(InProcess):
    """A host that has its own folder `root` at the path `shown` of the others."""

    runs_twice = False  # as if its process was lost at the end of each function

    def __init__(self, name: str, shown: Path, root: Path) -> None:
        super().__init__(name)
        self.shown, self.root = shown, root

    def at(self, path: Path) -> Path:
        return self.root / path.relative_to(self.shown)

    def start(self, function: Function, *args: Any, timeout_s: float) -> HostCall:
        given = [self.at(arg) if isinstance(arg, Path) else arg for arg in args]
        if function is host_files.look_for:
            given, function = [self.host, *given], view_from
        if self.runs_twice:
            given, function = [function, *given], run_twice
        return super().start(function, *given, timeout_s=timeout_s)


def view_from(host: str, file: Path) -> HostView:
    return HostView(host, "boot", file.exists())


def run_twice(function: Function, *args: Any) -> Any:
    function(*args)
    return function(*args)


class Role:
    """A file for each rank; to load, every host of the role needs all of them."""

    def __init__(self, machines: Sequence[Machine]) -> None:
        self.machines, self.state, self.loaded = machines, "", [""]

    @property
    def hosts(self) -> list[Machine]:
        return list(dict.fromkeys(self.machines))

    def begin_save(self, folder: Path) -> Answer:
        self.saving = folder
        return Answer()

    def end_save(self) -> Answer:
        entries = []
        for rank, machine in enumerate(self.machines):
            file = machine.at(self.saving) / f"rank_{rank}"
            file.parent.mkdir(exist_ok=True)
            file.write_text(f"{self.state} of rank {rank}")
            entries.append({**entry_of(file.parent, file), HOST: machine.host})
        return Answer(Written(entries, seconds=1.0))

    def load_state(self, folder: Path) -> Answer:
        self.loaded = [
            " | ".join(file.read_text() for file in sorted(machine.at(folder).glob("rank_*")))
            for machine in self.machines
        ]
        return Answer(Loaded())


class Cluster:
    """A driver's host and others; the actor on the driver's and on b, the critic on b and c."""

    def __init__(self, make_tree: MakeTree, root: Path, **keys: Any) -> None:
        keys = {"output_dir": str(root / "run"), "no_shared_storage": True, **keys}
        tree = make_tree({f"training.{name}": value for name, value in keys.items()})
        self.config, self.directory = resolve(tree, "test"), RunDirectory(root / "run")
        self.directory.path.mkdir(parents=True)
        (self.directory.path / "config.yaml").touch()
        shown = self.directory.path
        self.driver = Machine("a", shown, shown)
        self.b, self.c, self.d = (Machine(name, shown, root / name) for name in "bcd")
        self.actor, self.critic = Role([self.driver, self.b]), Role([self.b, self.c])
        self.notes: list[str] = []

    def start(self) -> int:
        """Restore in a new process; return the iteration, 0 = a new start."""
        roles: Any = SimpleNamespace(actor=self.actor, critic=self.critic)
        self.checkpoints = RunCheckpoints(self.config, roles, self.directory, "prompts")
        state = self.checkpoints.restore(self.notes.append)
        return state["iteration"] if state else 0

    def save(self, *iterations: int) -> None:
        for iteration in iterations:
            self.actor.state, self.critic.state = f"actor {iteration}", f"critic {iteration}"
            self.checkpoints.write(iteration, self.notes.append)
            state = trainer_state(iteration)
            self.checkpoints.commit(iteration, state, None, self.notes.append)

    def has_noted(self, text: str) -> bool:
        return any(text in note for note in self.notes)

    def assert_loaded(self, iteration: int) -> None:
        """Every host of a role has the files of both ranks."""
        for name, role in (("actor", self.actor), ("critic", self.critic)):
            state = f"{name} {iteration} of rank"
            assert role.loaded == [f"{state} 0 | {state} 1"] * 2

    def files(self, machine: Machine) -> list[str]:
        """All files of checkpoints on a host."""
        folder = machine.at(self.directory.checkpoints)
        return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


@pytest.fixture
def new_cluster(make_tree: MakeTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NewCluster:
    """Keyword arguments are keys of the training section."""
    for module in ("run.host_files", "run.host_parts"):  # files of several chunks
        monkeypatch.setattr(f"mindspeed_rlxf.{module}.CHUNK_BYTES", 5)
    return lambda **keys: Cluster(make_tree, tmp_path, **keys)


@pytest.fixture
def cluster(new_cluster: NewCluster) -> Cluster:
    """Started; keeps one checkpoint."""
    found = new_cluster(keep_last=1)
    assert found.start() == 0
    return found


@pytest.fixture
def with_two_saves(new_cluster: NewCluster) -> Cluster:
    found = new_cluster()
    found.start()
    found.save(2, 4)
    return found


def files_of(iteration: int, *parts: str) -> list[str]:
    names = [*parts, "manifest.json", "trainer/config.yaml", "trainer/state.json"]
    return [*sorted(f"iter_{iteration:07d}/{name}" for name in names), POINTER]


def test_each_host_keeps_its_part(cluster: Cluster) -> None:
    assert cluster.notes == ["note: b, c keep their parts of checkpoints on their own disks"]
    cluster.save(2)
    assert cluster.files(cluster.driver) == files_of(2, "actor/rank_0")
    assert cluster.files(cluster.b) == files_of(2, "actor/rank_1", "critic/rank_0")
    assert cluster.files(cluster.c) == files_of(2, "critic/rank_1")


def test_hosts_remove_the_parts_that_the_driver_has_removed(cluster: Cluster) -> None:
    cluster.save(2, 4)
    for machine in (cluster.driver, cluster.b, cluster.c):
        names = {path.partition("/")[0] for path in cluster.files(machine)}
        assert names == {"iter_0000004", POINTER}


def test_every_host_of_a_role_gets_all_files_of_the_role(cluster: Cluster) -> None:
    cluster.save(2)
    assert cluster.start() == 2
    cluster.assert_loaded(2)
    assert "critic/rank_0" not in str(cluster.files(cluster.driver)), "no rank there reads it"


@pytest.mark.parametrize("runs_twice", [False, True])
def test_roles_may_move_to_other_hosts(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, runs_twice: bool
) -> None:
    """Also where an agent repeats every function."""
    monkeypatch.setattr(Machine, "runs_twice", runs_twice)
    for iteration in (2, 4):
        cluster.save(iteration)
        assert cluster.files(cluster.c) == files_of(iteration, "critic/rank_1")
    cluster.actor.machines = [cluster.c, cluster.d]  # c had none of its files, d is new
    cluster.critic.machines = [cluster.b, cluster.driver]
    assert cluster.start() == 4
    cluster.assert_loaded(4)


def test_a_kill_before_the_driver_commits_resumes_from_the_checkpoint_before(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.save(2)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunStore, "commit", commit_apart(cluster))
        cluster.save(4)
    for machine in (cluster.b, cluster.c):
        assert "iter_0000004/manifest.json" in cluster.files(machine)
    assert "iter_0000004/manifest.json" not in cluster.files(cluster.driver)
    assert cluster.start() == 2
    cluster.assert_loaded(2)
    cluster.save(4)
    assert cluster.start() == 4
    cluster.assert_loaded(4)


def commit_apart(cluster: Cluster) -> Callable[..., Path]:
    """A commit that is interrupted on the driver's host."""
    original = RunStore.commit

    def commit(store: RunStore, manifest: Any) -> Path:
        if store.folder == cluster.directory.checkpoints:
            raise KeyboardInterrupt
        return original(store, manifest)

    return commit


def test_a_file_that_its_host_lost_damages_the_checkpoint(with_two_saves: Cluster) -> None:
    cluster = with_two_saves
    (cluster.c.at(cluster.directory.checkpoints) / "iter_0000004/critic/rank_1").unlink()
    assert cluster.start() == 2
    assert cluster.has_noted("damaged: critic/rank_1 is on no host of this run")


@pytest.mark.parametrize(
    ("host", "rank", "has_copies"),
    [("b", 0, False), ("c", 1, False), ("c", 0, True)],
    ids=["read where it is", "copied to another host first", "a copy of an earlier start"],
)
def test_a_changed_file_damages_the_checkpoint(
    with_two_saves: Cluster, host: str, rank: int, has_copies: bool
) -> None:
    cluster = with_two_saves
    if has_copies:
        cluster.start()  # each host of the critic has both files now
    checkpoints = getattr(cluster, host).at(cluster.directory.checkpoints)
    file = checkpoints / f"iter_0000004/critic/rank_{rank}"
    file.write_text(file.read_text().upper())
    assert cluster.start() == 2
    assert cluster.has_noted(f"critic/rank_{rank} differs from what was written")


def test_a_host_that_is_not_in_the_run_is_named(cluster: Cluster) -> None:
    cluster.save(2)
    cluster.critic.machines = [cluster.b, cluster.d]
    rule = r"must have its files on hosts of this run \(a, b, d\), only c kept critic/rank_1;"
    with pytest.raises(UserError, match=rule):
        cluster.start()
    assert cluster.critic.loaded == [""]


def test_a_hostile_file_of_another_host_is_never_loaded(cluster: Cluster) -> None:
    cluster.save(2)
    hostile = cluster.c.at(cluster.directory.checkpoints) / "iter_0000002/critic/common.pt"
    hostile.write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(UserError, match=r"can be resumed from: .*common\.pt.*\(on "):
        cluster.start()
    assert cluster.critic.loaded == [""]


def test_hosts_that_share_a_folder_without_the_driver_have_one_server(
    cluster: Cluster, tmp_path: Path
) -> None:
    """As where the driver runs on a login node."""
    both = [Machine(name, cluster.directory.path, tmp_path / "nfs") for name in ("e", "f")]
    cluster.actor.machines = cluster.critic.machines = both
    cluster.start()
    cluster.save(2)
    names = [f"{role}/rank_{rank}" for role in ("actor", "critic") for rank in (0, 1)]
    assert cluster.files(both[0]) == files_of(2, *names)
    assert cluster.start() == 2
    cluster.assert_loaded(2)


def test_without_the_key_the_hosts_are_named(new_cluster: NewCluster) -> None:
    cluster = new_cluster(no_shared_storage=False)
    with pytest.raises(UserError, match="storage that all hosts share, b, c do not see it; use"):
        cluster.start()
    assert not list(cluster.directory.checkpoints.iterdir()), "nothing is left of the probe"


def test_a_probe_of_another_start_does_not_count(new_cluster: NewCluster) -> None:
    """Of a copy of the run, or of a driver that was killed while it looked."""
    cluster = new_cluster()
    for machine in (cluster.driver, cluster.b, cluster.c):
        stale = machine.at(cluster.directory.checkpoints / PROBE)
        stale.parent.mkdir(parents=True, exist_ok=True)
        stale.touch()
    cluster.start()
    assert cluster.has_noted("keep their parts of checkpoints on their own disks")


def test_with_shared_storage_the_key_changes_nothing(new_cluster: NewCluster) -> None:
    cluster = new_cluster()
    cluster.actor.machines = cluster.critic.machines = [cluster.driver]
    assert cluster.start() == 0 and cluster.notes == []
    cluster.save(2)
    folder = cluster.checkpoints.store.path(2)
    assert not any(HOST in entry for entry in Checkpoint(folder, 2).read().files)
    shutil.rmtree(folder / "critic")
    with pytest.raises(UserError, match=r"can be resumed from: .* is missing"):
        cluster.start()


def test_torchrun_is_refused(new_cluster: NewCluster) -> None:
    cluster = new_cluster()
    kind = cluster.config.runtime.model_copy(update={"kind": RuntimeKind.LOCAL})
    cluster.config = cluster.config.model_copy(update={"runtime": kind})
    with pytest.raises(UserError, match=r"no_shared_storage=true needs runtime=ray.*b, c"):
        cluster.start()
