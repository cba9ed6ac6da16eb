"""A run directory with checkpoints whose roles are stand-ins: each has a text as its state."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mindspeed_rlxf.checkpoint.checkpoints import RunCheckpoints
from mindspeed_rlxf.checkpoint.directory import RunDirectory
from mindspeed_rlxf.config.enums import Role as ConfigRole
from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.weights.state_files import (
    attempt,
    entry_of,
    find_damage,
    role_entries,
    write_rank_index,
)

MakeTree = Callable[..., dict[str, Any]]


class Answer:
    """A pending call that has ended already, with one report."""

    def __init__(self, report: Any = None) -> None:
        self.report = report

    def result(self) -> list[Any]:
        return [self.report]


class Role:
    """A stand-in for a role group; its state is a text, saved to the file `state`.

    ranks: each writes its part of the index
    """

    def __init__(self, state: str, ranks: int) -> None:
        self.state, self.loaded, self.ranks = state, "", ranks
        self.group = self

    def call_engine(self, method: Callable[..., Any], *args: Any) -> Answer:
        return getattr(self, method.__name__)(*args)  # type: ignore[no-any-return]

    def begin_save(self, folder: Path) -> Answer:
        self.saving: tuple[Path, str] | None = (folder, self.state)
        return Answer()

    def write(self) -> None:
        """Write the state of `begin_save`, as the ranks do in the background."""
        if self.saving is not None:
            (folder, state), self.saving = self.saving, None
            folder.mkdir(parents=True)
            (folder / "state").write_text(state)
            for rank in range(self.ranks):
                entries = [entry_of(folder, folder / "state")] if rank == 0 else []
                write_rank_index(folder, rank, entries, {})

    def end_save(self) -> Answer:
        self.write()
        return Answer(7.0)

    def load_state(self, folder: Path) -> Answer:
        def load() -> None:
            if damage := find_damage(folder, role_entries(folder)):
                raise ValueError(f"{folder.name}/{'; '.join(damage)}")
            self.loaded = (folder / "state").read_text()

        return Answer(attempt(load))


def stand_ins(config: RunConfig) -> tuple[Role, Role]:
    """Return an actor and a critic with as many ranks as the configuration has."""
    actor, critic = (config.layout(role) for role in (ConfigRole.ACTOR_ROLLOUT, ConfigRole.CRITIC))
    return Role("actor", actor.world_size), Role("critic", critic.world_size)


def trainer_state(iteration: int) -> dict[str, Any]:
    """Return a state of the form that `PpoTrainer` saves."""
    sampler = {"epoch": 0, "offset": 1, "num_prompts": 2, "seed": 3, "shuffle": 1}
    prompts = {"sampler": sampler, "next_sample_id": 4}
    return {"iteration": iteration, "kl": {"value": 0.5}, "prompts": prompts}


class Clock:
    """A clock that tests set by `now`, in seconds."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Case:
    """A run with an actor and a critic, its checkpoints, notes and clock.

    keys: keys of `training`
    """

    def __init__(self, make_tree: MakeTree, folder: Path, **keys: Any) -> None:
        keys = {f"training.{k}": v for k, v in {"output_dir": str(folder), **keys}.items()}
        self.config = resolve(make_tree(keys), "test")
        self.directory = RunDirectory(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").touch()
        self.actor, self.critic, self.clock = *stand_ins(self.config), Clock()
        self.notes: list[str] = []
        self.restart()

    def restart(self, prompts: str = "p") -> None:
        """Make new checkpoint objects, as a new process does. prompts: digest of the prompts"""
        roles: Any = SimpleNamespace(actor=self.actor, critic=self.critic, rollout=None)
        self.checkpoints = RunCheckpoints(
            self.config, roles, self.directory, prompts, clock=self.clock
        )
        self.store = self.checkpoints.store

    def resume(self, prompts: str = "p") -> int:
        """Restore the newest checkpoint as a new process does; return its iteration, 0 = none."""
        self.restart(prompts)
        self.notes.clear()
        state = self.checkpoints.restore(self.notes.append)
        return state["iteration"] if state else 0

    def iterate(self, *iterations: int, score: float | None = None) -> None:
        """Do these iterations with a checkpoint after each. score: validation score of each"""
        for iteration in iterations:
            self.actor.state, self.critic.state = f"actor {iteration}", f"critic {iteration}"
            self.checkpoints.settle(self.notes.append)
            self.checkpoints.write(iteration, self.notes.append)
            with self.directory.metrics.open("a") as file:
                file.write(json.dumps({"iteration": iteration}) + "\n")
            self.checkpoints.commit(iteration, trainer_state(iteration), score, self.notes.append)

    @property
    def lines(self) -> list[int]:
        """The iterations of metrics.jsonl."""
        text = self.directory.metrics.read_text()
        return [json.loads(line)["iteration"] for line in text.splitlines()]

    @property
    def kept(self) -> list[int]:
        """The iterations of the checkpoints, the newest first."""
        return [checkpoint.iteration for checkpoint in self.store.newest_first()]
