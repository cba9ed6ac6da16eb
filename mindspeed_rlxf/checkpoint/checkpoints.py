"""Save and restore the checkpoints of a run, from the driver."""

import json
import math
import platform
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mindspeed_rlxf
from mindspeed_rlxf.checkpoint import driver_state, lock
from mindspeed_rlxf.checkpoint.directory import RunDirectory
from mindspeed_rlxf.checkpoint.store import Manifest, RunStore
from mindspeed_rlxf.cluster.errors import StorageUnreadable
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.keys import to_yaml
from mindspeed_rlxf.config.problems import Problem, UserError
from mindspeed_rlxf.config.schema import SAVED_AS, RunConfig
from mindspeed_rlxf.reporting.jsonl import cut_token_files
from mindspeed_rlxf.reporting.phases import phase
from mindspeed_rlxf.roles.actor import ActorGroup
from mindspeed_rlxf.roles.all_roles import RoleGroups
from mindspeed_rlxf.roles.critic import CriticGroup
from mindspeed_rlxf.weights.state_files import (
    Entry,
    Loaded,
    entry_of,
    has_parts,
    merge_parts,
    under,
    write_text,
)

Note = Callable[[str], None]
POLL_S = 0.2
SEEN_WITHIN_S = 30.0  # network file systems show new files late


class RunCheckpoints:
    """Save and restore the state of all roles and of the driver.

    Saving has two steps: roles write to a hidden folder (`write`), then it is renamed (`commit`).
    Between the two the caller writes the iteration's line of metrics.jsonl, with the
    time that writing took. With `async_save` the roles write during the next iteration; a thread
    renames the folder as soon as all have written, and `settle` waits for that.
    """

    def __init__(
        self,
        config: RunConfig,
        roles: RoleGroups,
        directory: RunDirectory,
        prompts_digest: str,
        writes: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """prompts_digest: `hash_prompts` of this run, which a resumed checkpoint must have
        writes: False on all but the first rank of torchrun, which then write no driver files
        clock:  seconds, for saves by time
        """
        self.config, self.directory, self.writes = config, directory, writes
        self.store = RunStore(directory.checkpoints)
        self.prompts_digest = prompts_digest
        self.trained: dict[Role, ActorGroup | CriticGroup] = {Role.ACTOR_ROLLOUT: roles.actor}
        if roles.critic is not None:
            self.trained[Role.CRITIC] = roles.critic
        self._clock = clock
        self._last_save = clock()
        self._scores: dict[int, float] = {}  # validation scores of the checkpoints
        self._waiting: Future[list[str]] | None = None  # of an asynchronous save: its notes
        self._give_up = math.inf  # when to wait no longer for the files of ranks
        self.write_s = 0.0  # seconds of the last asynchronous write, beside an iteration
        self.newest = 0  # iteration of the newest complete checkpoint of this process; 0 = none
        self.on_publish: Callable[[int], None] = lambda _: None  # called with `newest`

    def is_due(self, iteration: int, stops: bool = False) -> bool:
        """Return whether to save after this iteration.

        True after the last iteration, every `save_interval` iterations, and if
        `seconds_between_saves` have passed since the last save of this process, or since its start
        without one; 0 turns either of the two off.
        stops: the run ends early, after this iteration: True
        """
        training = self.config.training
        interval, seconds = training.save_interval, training.seconds_between_saves
        is_last = stops or iteration == training.train_iters
        is_multiple = interval > 0 and iteration % interval == 0
        return is_last or is_multiple or 0 < seconds <= self._clock() - self._last_save

    def write(self, iteration: int, note: Note) -> float:
        """Let all ranks write a checkpoint to a hidden folder; return the seconds that this took.

        First finishes an earlier asynchronous save (`settle`), whose seconds do not count. Waits
        until all files are written, or with `async_save` until the ranks have copied their state.
        """
        self.settle(note)
        started = time.monotonic()
        with phase(f"writing the checkpoint of iteration {iteration}", prints=False):
            self._begin_write(iteration)
            if not self.config.training.async_save:
                self._wait_for_ranks()
        return time.monotonic() - started

    def _begin_write(self, iteration: int) -> None:
        """Make the hidden folder, let all ranks begin to write, and wait for copies of their state.

        First removes unfinished checkpoints. The copies are in memory; the files are written later.
        """
        hidden, self._give_up = self.store.hidden(iteration), math.inf
        if self.writes:
            self.store.begin(iteration)
        begun = [group.begin_save(hidden / SAVED_AS[role]) for role, group in self.trained.items()]
        for call in begun:
            call.result()

    def commit(
        self, iteration: int, state: dict[str, Any], score: float | None, note: Note
    ) -> None:
        """Add the driver's state and publish the checkpoint; with `async_save` in a thread.

        In either case fsyncs the line files now; their present lengths are part of the state.
        score: value of `validation.best_metric`, None = not validated
        note:  prints a line for the user
        """
        self._last_save = self._clock()
        content = {
            "iteration": iteration,
            "trainer": state,
            "positions": driver_state.line_positions(self.directory),
            "prompts_digest": self.prompts_digest,
            "score": score,
            "score_metric": self.config.validation.best_metric,
        }
        self._waiting = Future()
        if self.config.training.async_save:
            arguments = self._waiting, content
            threading.Thread(target=self._publish_into, args=arguments, daemon=True).start()
        else:
            self._publish_into(self._waiting, content)
            self.settle(note)

    def settle(self, note: Note) -> None:
        """Wait until an asynchronous save in progress is published; do nothing without one."""
        if self._waiting is not None:
            if self._give_up == math.inf:
                self._wait_for_ranks()
            waiting, self._waiting = self._waiting, None
            for line in waiting.result():
                note(line)

    def close(self) -> None:
        """End an asynchronous save, which is published only if all ranks have written already."""
        if self._waiting is not None:
            self._give_up = 0.0
            wait([self._waiting])

    def _wait_for_ranks(self) -> None:
        """Wait until the ranks of all roles have written their files; raises their errors.

        With `async_save` sets `write_s`, the seconds of the slowest role's write.
        """
        calls = [group.end_save() for group in self.trained.values()]
        seconds = max(call.result()[0] for call in calls)
        if self.config.training.async_save:
            self.write_s = seconds
        self._give_up = time.monotonic() + SEEN_WITHIN_S

    def _publish_into(self, waiting: Future[list[str]], content: dict[str, Any]) -> None:
        """Publish a checkpoint; set the result, lines for the user, or the error of `waiting`."""
        try:
            lines = self._publish(content) if self.writes else []
            self.newest = content["iteration"]
            self.on_publish(self.newest)
            waiting.set_result(lines)
        except BaseException as error:
            waiting.set_exception(error)

    def _publish(self, content: dict[str, Any]) -> list[str]:
        """Wait for all ranks, write the driver's files and the manifest, and rename the folder.

        Removes old checkpoints, and updates the files that name the latest and the best one.
        Returns lines for the user. Raises RuntimeError if files of ranks are missing.
        """
        iteration, hidden = content["iteration"], self.store.hidden(content["iteration"])
        files = self._merge_parts(hidden)
        lock.require(self.directory.path)
        texts = {
            f"{driver_state.TRAINER}/{driver_state.STATE}": json.dumps(content, indent=1),
            f"{driver_state.TRAINER}/{driver_state.CONFIG}": to_yaml(self.config),
        }
        for path, text in texts.items():
            write_text(hidden / path, text)
        files += [entry_of(hidden, hidden / path) for path in texts]
        final = self.store.commit(Manifest(iteration, files, _describe_writer(self.config)))
        training = self.config.training
        self._note_score(content)
        best = self._find_best()
        self.store.point_to_best(best)
        try:
            left = self.store.prune(training.keep_last, training.keep_every, best)
        except OSError as error:
            left = [f"old checkpoints are not removed: {error}; the next save tries again"]
        said = f"checkpoint of iteration {iteration}: {final}"
        return [said, *(f"warning: {line}" for line in left)]

    def _merge_parts(self, hidden: Path) -> list[Entry]:
        """Wait until all ranks have written; merge what they wrote to an index for each role.

        Returns the entries of the indexes. Raises RuntimeError if it takes too long after the ranks
        have said that they are done.
        """
        ranks = {
            name: self.config.layout(role).world_size
            for role, name in SAVED_AS.items()
            if role in self.trained
        }
        while lacking := [name for name, n in ranks.items() if not has_parts(hidden / name, n)]:
            if time.monotonic() > self._give_up:
                raise RuntimeError(
                    f"{hidden} must have the files of all ranks of {' and '.join(lacking)}; is it "
                    "the same folder on every node?"
                )
            time.sleep(POLL_S)
        merged = {name: merge_parts(hidden / name, n) for name, n in ranks.items()}
        return [entry for name, index in merged.items() for entry in under(name, [index])]

    def _note_score(self, state: dict[str, Any]) -> None:
        """Remember the validation score in a driver's state, if it has one."""
        score = driver_state.find_score(state, self.config.validation.best_metric)
        if score is not None:
            self._scores[state["iteration"]] = score

    def _find_best(self) -> list[int]:
        """Return [iteration of the highest score, the earliest of equals]; [] without scores."""
        scores = self._scores
        return [max(scores, key=lambda n: (scores[n], -n))] if scores else []

    def restore(self, note: Note) -> dict[str, Any] | None:
        """Load the newest undamaged checkpoint into the roles; return the driver's state.

        None if there are no checkpoints. Cuts line files to their length at the checkpoint (to 0
        without one), removes later iterations from token files, renames later checkpoints, and
        removes unfinished ones. Raises UserError where the prompts differ, and where all
        checkpoints are damaged; StorageUnreadable, with nothing changed, if files cannot be read.
        note: prints a line: each checkpoint that is passed over, and from where the run goes on
        """
        whole, problems = driver_state.find_whole_checkpoints(self.config, self.store)
        for found in whole:
            loaded = self._check_and_load(found)
            if loaded.problem:
                problems.append(loaded.problem)
                continue
            for problem in problems:
                note(f"warning: {problem}; resuming from an older checkpoint")
            for each in whole[whole.index(found) :]:
                self._note_score(each.state)
            self._rewind_directory(found, loaded.same_layout, note)
            return found.state
        if problems:  # a new start would remove the checkpoints and records
            raise UserError(driver_state.no_whole_checkpoint(self.directory, problems))
        if self.writes:
            self.store.clear_unfinished()
            if any(driver_state.line_positions(self.directory).values()):
                note("no checkpoint to resume from: starting again from iteration 0")
            driver_state.cut_files(self.directory, {})
            cut_token_files(self.directory.samples_tokens, 0)
        return None

    def _check_and_load(self, found: driver_state.WholeCheckpoint) -> Loaded:
        """Check a checkpoint and load it into the roles.

        `problem` of the result says why it cannot be resumed from: a damaged file, a line file that
        is shorter than at the checkpoint, or a state that does not fit a role. Raises UserError
        where the run has other prompts.
        """
        path = found.checkpoint.path
        positions = found.state["positions"]
        if lacking := driver_state.find_shortened_file(self.directory, positions):
            return Loaded(f"{path} cannot be resumed from: {lacking}")
        if found.state["prompts_digest"] != self.prompts_digest:
            raise UserError(
                Problem(
                    "data.train_files",
                    f"must give the prompts of the run in {self.directory.path}, with this "
                    "tokenizer they are others",
                    remedy="put files and tokenizer back, or set training.new_run=true",
                )
            )
        return self._load_roles(path)

    def load_newest(self, note: Note) -> int:
        """Load the newest checkpoint that fits into the roles; return its iteration, 0 for none.

        For commands that do not continue the run: changes nothing in the run directory, which every
        host must see. Raises UserError where there are checkpoints and none can be loaded.
        note: prints a line: the loaded folder, after a warning for each that cannot be loaded
        """
        whole, problems = driver_state.find_whole_checkpoints(self.config, self.store)
        for found in whole:
            path = found.checkpoint.path
            loaded = self._load_roles(path)
            if not loaded.problem:
                for problem in problems:
                    note(f"warning: {problem}; an older checkpoint is taken")
                note(f"weights of {path}")
                return found.checkpoint.iteration
            problems.append(loaded.problem)
        if problems:
            raise UserError(driver_state.no_whole_checkpoint(self.directory, problems))
        return 0

    def _load_roles(self, path: Path) -> Loaded:
        calls = [group.load_state(path / SAVED_AS[role]) for role, group in self.trained.items()]
        loaded: list[Loaded] = [each for call in calls for each in call.result()]
        wrong = "; ".join(dict.fromkeys(each.problem for each in loaded if each.problem))
        if unreadable := "; ".join(each.unreadable for each in loaded if each.unreadable):
            raise StorageUnreadable(f"{path} cannot be read: {unreadable}")
        if wrong:
            return Loaded(f"{path} cannot be resumed from: {wrong}")
        return Loaded(same_layout=all(each.same_layout for each in loaded))

    def _rewind_directory(
        self, found: driver_state.WholeCheckpoint, same_layout: bool, note: Note
    ) -> None:
        """Bring the run directory back to the checkpoint that the roles have loaded.

        The driver's state is not touched. Sets `newest`, removes later iterations from the token
        files, and prints notes: where the run resumes, each renamed checkpoint, a layout that
        differs. The process that writes also renames later checkpoints to NAME.unused, points to
        this checkpoint as latest and to the best of those left, and cuts line files.
        """
        checkpoint, positions = found.checkpoint, found.state["positions"]
        if self.writes:
            self.store.clear_unfinished()
            for other in self.store.newest_first():
                if other.iteration > checkpoint.iteration:
                    aside = self.store.move_aside(other)
                    note(f"note: {other.path.name} is not resumed from; renamed to {aside.name}")
            self.store.point_to(checkpoint.iteration)
            self.store.point_to_best(self._find_best())
            driver_state.cut_files(self.directory, positions)
            cut_token_files(self.directory.samples_tokens, checkpoint.iteration)
        self.newest = checkpoint.iteration
        note(f"resumed from {checkpoint.path}; its weights replace those of `load`")
        if not same_layout:
            note(
                "note: the layout or the kind of device has changed; weights, optimizer and data "
                "continue exactly, the random streams of the ranks start from the seed"
            )


def _describe_writer(config: RunConfig) -> dict[str, Any]:
    """Return {"versions", "layouts"} of this run, for the manifest.

    versions: package -> version, None = not installed; of this package, Python, torch,
              megatron-core, ray and numpy
    layouts:  saved name of each trained role -> world size, tp and pp
    """
    layouts = {name: config.layout(role) for role, name in SAVED_AS.items() if role in config.roles}
    return {
        "versions": {
            "mindspeed_rlxf": mindspeed_rlxf.__version__,
            "python": platform.python_version(),
            **{name: _find_version(name) for name in ("torch", "megatron-core", "ray", "numpy")},
        },
        "layouts": {
            name: {"world_size": layout.world_size, "tp": layout.tp, "pp": layout.pp}
            for name, layout in layouts.items()
        },
    }


def _find_version(name: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return version(name)
    except ImportError:  # a checkout on the path, not a package that is installed
        return None
