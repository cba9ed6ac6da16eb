"""Checkpoints of hosts without a common folder: written apart, named together, brought together."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_rlxf.cluster.host_agent import Function, HostCall, ThreadCall
from mindspeed_rlxf.config.enums import RuntimeKind
from mindspeed_rlxf.config.errors import UserError
from mindspeed_rlxf.config.resolve import resolve
from mindspeed_rlxf.run import host_files
from mindspeed_rlxf.run.checkpoints import PROBE, RunCheckpoints
from mindspeed_rlxf.run.directory import RunDirectory
from mindspeed_rlxf.run.host_files import HostView
from mindspeed_rlxf.weights.state_files import HOST, Written, entry_of
from tests.unit.cluster.agents import InProcess
from tests.unit.config.conftest import make_tree, no_cluster

__all__ = ["make_tree", "no_cluster"]
MakeTree = Callable[..., dict[str, Any]]


class Answer:
    def __init__(self, report: Any = None) -> None:
        self._report = report

    def result(self) -> list[Any]:
        return [self._report]


class Machine(InProcess):
    """A host that shows its own folder `root` where the others have `shown`."""

    runs_twice = False  # as where its process was lost at the end of each function

    def __init__(self, name: str, shown: Path, root: Path) -> None:
        super().__init__(name)
        self.shown, self.root = shown, root

    def at(self, path: Path) -> Path:
        return self.root / path.relative_to(self.shown)

    def start(self, function: Function, *args: Any, timeout_s: float) -> HostCall:
        given = [self.at(arg) if isinstance(arg, Path) else arg for arg in args]
        if function is host_files.look_for:
            given, function = [self.host, *given], seen_from
        if self.runs_twice:
            given, function = [function, *given], twice
        return super().start(function, *given, timeout_s=timeout_s)


def seen_from(host: str, file: Path) -> HostView:
    return HostView(host, "boot", file.exists())


def twice(function: Function, *args: Any) -> Any:
    given = [arg.result() if isinstance(arg, ThreadCall) else arg for arg in args]
    function(*given)
    return function(*given)


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
        return Answer(True)


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
        self.said: list[str] = []

    def start(self) -> dict[str, Any] | None:
        """As a new process does."""
        roles: Any = SimpleNamespace(actor=self.actor, critic=self.critic)
        self.checkpoints = RunCheckpoints(self.config, roles, self.directory, "prompts")
        return self.checkpoints.restore(self.said.append)

    def save(self, iteration: int) -> None:
        self.actor.state, self.critic.state = f"actor {iteration}", f"critic {iteration}"
        self.checkpoints.write(iteration, self.said.append)
        self.checkpoints.commit(iteration, {"iteration": iteration}, None, self.said.append)

    def files(self, machine: Machine) -> list[str]:
        """All files of checkpoints on a host."""
        folder = machine.at(self.directory.checkpoints)
        return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


@pytest.fixture
def cluster(make_tree: MakeTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    for module in ("run.host_files", "run.host_parts"):  # files of several chunks
        monkeypatch.setattr(f"mindspeed_rlxf.{module}.CHUNK_BYTES", 5)
    found = Cluster(make_tree, tmp_path, keep_last=1)
    assert found.start() is None
    return found


def of(iteration: int, *parts: str) -> list[str]:
    names = [*parts, "manifest.json", "trainer/config.yaml", "trainer/state.json"]
    return sorted(
        [f"iter_{iteration:07d}/{name}" for name in names] + ["latest_checkpointed_iteration.txt"]
    )


def test_each_host_keeps_its_part(cluster: Cluster) -> None:
    assert cluster.said == ["note: b, c keep their parts of checkpoints on their own disks"]
    cluster.save(2)
    assert cluster.files(cluster.driver) == of(2, "actor/rank_0")
    assert cluster.files(cluster.b) == of(2, "actor/rank_1", "critic/rank_0")
    assert cluster.files(cluster.c) == of(2, "critic/rank_1")


def test_old_parts_go_when_the_drivers_goes(cluster: Cluster) -> None:
    for iteration in (2, 4):
        cluster.save(iteration)
    for machine in (cluster.driver, cluster.b, cluster.c):
        assert {path.partition("/")[0] for path in cluster.files(machine)} == {
            "iter_0000004",
            "latest_checkpointed_iteration.txt",
        }


def test_a_run_goes_on_with_every_file_on_every_host_of_a_role(cluster: Cluster) -> None:
    cluster.save(2)
    state = cluster.start()
    assert state is not None and state["iteration"] == 2
    assert cluster.actor.loaded == ["actor 2 of rank 0 | actor 2 of rank 1"] * 2
    assert cluster.critic.loaded == ["critic 2 of rank 0 | critic 2 of rank 1"] * 2
    assert "critic/rank_0" not in str(cluster.files(cluster.driver)), "no rank there reads it"


def test_roles_may_stand_on_other_hosts_than_before(cluster: Cluster) -> None:
    cluster.save(2)
    cluster.actor.machines = [cluster.c, cluster.d]  # c had none of its files, d is new
    cluster.critic.machines = [cluster.b, cluster.driver]
    assert cluster.start() is not None
    assert cluster.actor.loaded == ["actor 2 of rank 0 | actor 2 of rank 1"] * 2
    assert cluster.critic.loaded == ["critic 2 of rank 0 | critic 2 of rank 1"] * 2


def test_every_function_of_a_host_may_run_twice(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Machine, "runs_twice", True)
    for iteration in (2, 4):
        cluster.save(iteration)
        assert cluster.files(cluster.c) == of(iteration, "critic/rank_1")
    cluster.actor.machines = [cluster.c, cluster.d]
    assert cluster.start() is not None
    assert cluster.actor.loaded == ["actor 4 of rank 0 | actor 4 of rank 1"] * 2


def test_a_kill_before_the_driver_names_it_goes_back_to_the_one_before(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.save(2)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(cluster.checkpoints.store), "point_to", killed_on(cluster.driver))
        patch.setattr(type(cluster.checkpoints.store), "commit", commit_apart(cluster))
        cluster.save(4)
    for machine in (cluster.b, cluster.c):  # named there, not only written
        assert "iter_0000004/manifest.json" in cluster.files(machine)
    assert "iter_0000004/manifest.json" not in cluster.files(cluster.driver)
    state = cluster.start()
    assert state is not None and state["iteration"] == 2
    assert cluster.critic.loaded == ["critic 2 of rank 0 | critic 2 of rank 1"] * 2
    cluster.save(4)
    assert cluster.start() is not None
    assert cluster.critic.loaded == ["critic 4 of rank 0 | critic 4 of rank 1"] * 2


def commit_apart(cluster: Cluster) -> Callable[..., Path]:
    """A commit that is interrupted where the driver's turn comes."""
    original = type(cluster.checkpoints.store).commit

    def commit(store: Any, manifest: Any) -> Path:
        if store.folder == cluster.directory.checkpoints:
            raise KeyboardInterrupt
        return original(store, manifest)

    return commit


def killed_on(machine: Machine) -> Callable[..., None]:
    def point_to(store: Any, iteration: int) -> None:
        assert store.folder != machine.shown / "checkpoints", "the driver must not get here"

    return point_to


def test_a_file_that_its_host_lost_damages_the_checkpoint(
    make_tree: MakeTree, tmp_path: Path
) -> None:
    cluster = Cluster(make_tree, tmp_path)
    cluster.start()
    cluster.save(2)
    cluster.save(4)
    (cluster.c.at(cluster.directory.checkpoints) / "iter_0000004/critic/rank_1").unlink()
    state = cluster.start()
    assert state is not None and state["iteration"] == 2
    assert any("damaged: critic/rank_1 is on no host of this run" in line for line in cluster.said)


@pytest.mark.parametrize("place", [0, 1])
def test_a_file_that_changed_damages_the_checkpoint(
    make_tree: MakeTree, tmp_path: Path, place: int
) -> None:
    """Whether it is read where it lies or brought to another host first."""
    cluster = Cluster(make_tree, tmp_path)
    cluster.start()
    cluster.save(2)
    cluster.save(4)
    file = cluster.critic.machines[place].at(cluster.directory.checkpoints)
    file = file / f"iter_0000004/critic/rank_{place}"
    file.write_text(file.read_text().upper())
    state = cluster.start()
    assert state is not None and state["iteration"] == 2
    assert any(f"critic/rank_{place} is not what was written" in line for line in cluster.said)


def test_a_host_with_files_of_its_own_reads_all_of_them(
    make_tree: MakeTree, tmp_path: Path
) -> None:
    cluster = Cluster(make_tree, tmp_path)
    cluster.start()
    cluster.save(2)
    cluster.save(4)
    cluster.start()  # each host of the critic has both files now
    copy = cluster.c.at(cluster.directory.checkpoints) / "iter_0000004/critic/rank_0"
    copy.write_text(copy.read_text().upper())
    state = cluster.start()
    assert state is not None and state["iteration"] == 2
    assert any("critic/rank_0 is not what was written" in line for line in cluster.said)


def test_a_host_that_is_away_is_named(cluster: Cluster) -> None:
    cluster.save(2)
    cluster.critic.machines = [cluster.b, cluster.d]
    with pytest.raises(
        UserError, match=r"files that only c kept \(critic/rank_1\), and this run's"
    ):
        cluster.start()
    assert cluster.critic.loaded == [""]


def test_a_hostile_file_of_another_host_is_never_opened(cluster: Cluster) -> None:
    cluster.save(2)
    hostile = cluster.c.at(cluster.directory.checkpoints) / "iter_0000002/critic/common.pt"
    hostile.write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(UserError, match=r"can be resumed: .*common\.pt.*\(on "):
        cluster.start()
    assert cluster.critic.loaded == [""]


def test_hosts_that_share_a_folder_with_each_other_have_one_server(
    cluster: Cluster, tmp_path: Path
) -> None:
    """As where the driver runs on a login node."""
    shown = cluster.directory.path
    both = [Machine(name, shown, tmp_path / "nfs") for name in ("e", "f")]
    cluster.actor.machines = cluster.critic.machines = both
    cluster.start()
    cluster.save(2)
    assert cluster.files(both[0]) == of(
        2, "actor/rank_0", "actor/rank_1", "critic/rank_0", "critic/rank_1"
    )
    assert cluster.start() is not None and cluster.actor.loaded[0].endswith("of rank 1")


def test_without_the_key_the_hosts_are_named(make_tree: MakeTree, tmp_path: Path) -> None:
    cluster = Cluster(make_tree, tmp_path, no_shared_storage=False)
    with pytest.raises(UserError, match="storage that all hosts share, b, c do not see it; use"):
        cluster.start()
    assert not list(cluster.directory.checkpoints.iterdir()), "nothing is left of the probe"


def test_a_folder_with_the_probe_of_another_start_is_not_taken_for_the_drivers(
    make_tree: MakeTree, tmp_path: Path
) -> None:
    """Of a copy of the run, or of a driver that was killed while it looked."""
    cluster = Cluster(make_tree, tmp_path)
    for machine in (cluster.driver, cluster.b, cluster.c):
        stale = machine.at(cluster.directory.checkpoints / PROBE)
        stale.parent.mkdir(parents=True, exist_ok=True)
        stale.touch()
    cluster.start()
    assert any(
        "keep their parts of checkpoints on their own disks" in line for line in cluster.said
    )


def test_with_shared_storage_the_key_changes_nothing(make_tree: MakeTree, tmp_path: Path) -> None:
    cluster = Cluster(make_tree, tmp_path)
    cluster.actor.machines = cluster.critic.machines = [cluster.driver]
    assert cluster.start() is None and cluster.said == []
    cluster.save(2)
    manifest = json.loads((cluster.checkpoints.store.path(2) / "manifest.json").read_text())
    assert not any(HOST in entry for entry in manifest["files"])
    shutil.rmtree(cluster.checkpoints.store.path(2) / "critic")
    with pytest.raises(UserError, match=r"can be resumed: .* is missing"):
        cluster.start()


def test_torchrun_is_refused(make_tree: MakeTree, tmp_path: Path) -> None:
    cluster = Cluster(make_tree, tmp_path)
    kind = cluster.config.runtime.model_copy(update={"kind": RuntimeKind.LOCAL})
    cluster.config = cluster.config.model_copy(update={"runtime": kind})
    with pytest.raises(UserError, match=r"no_shared_storage=true needs runtime=ray.*b, c"):
        cluster.start()
