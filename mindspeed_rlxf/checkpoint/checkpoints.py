"""Save and restore run checkpoints from the driver."""

import json
import math
import platform
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mindspeed_rlxf
from mindspeed_rlxf.checkpoint import lock
from mindspeed_rlxf.checkpoint.directory import RunDirectory, export_folders
from mindspeed_rlxf.checkpoint.store import (
    AHEAD,
    BEST,
    CONFIG,
    EXPORTED,
    POINTER,
    STATE,
    TRAINER,
    WENT_BACK,
    Checkpoint,
    Manifest,
    RunStore,
    cut_files,
    find_shortened_file,
    find_whole_checkpoints,
    line_positions,
    no_whole_checkpoint,
)
from mindspeed_rlxf.cluster.errors import StorageUnreadable
from mindspeed_rlxf.config import packages
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.keys import to_yaml
from mindspeed_rlxf.config.problems import Problem, UserError
from mindspeed_rlxf.config.rank_layout import ParallelLayout
from mindspeed_rlxf.config.schema import SAVED_AS, RunConfig
from mindspeed_rlxf.engine.train_engine import TrainEngine
from mindspeed_rlxf.reporting.jsonl import cut_token_files
from mindspeed_rlxf.reporting.phases import phase
from mindspeed_rlxf.roles.actor import ActorGroup
from mindspeed_rlxf.roles.all_roles import RoleGroups
from mindspeed_rlxf.roles.critic import CriticGroup
from mindspeed_rlxf.weights.state_files import (
    Entry,
    Loaded,
    entries_below,
    entry_of,
    find_damage,
    has_rank_indexes,
    merge_rank_indexes,
    under,
    write_text,
)

Note = Callable[[str], None]
SEEN_WITHIN_S = 30.0  # network file systems show new files late


class RunCheckpoints:
    """Saves and restores the state of all roles and the driver.

    A save has two steps: the roles write to a hidden folder (`write`), then the driver renames it
    (`commit`). In between the caller writes the iteration's metrics.jsonl line, including the write
    time. With `async_save` the roles write during the next iteration, a thread renames the folder
    once all ranks are done, and `settle` waits for it.
    """

    def __init__(
        self,
        config: RunConfig,
        roles: RoleGroups,
        directory: RunDirectory,
        prompts_digest: str,
        writes: bool = True,
        clock: Callable[[], float] = time.monotonic,
        agree: Callable[[Any], Any] = lambda mine: mine,
    ) -> None:
        """Prepare; nothing is read or written yet.

        `prompts_digest` (this run's `hash_prompts`) must match when resuming. `writes` is False on
        all torchrun ranks but the first, which skip the driver's files. `clock` counts seconds.
        `agree` returns the first rank's argument on all torchrun ranks.
        """
        self.config = config
        self.directory = directory
        self.writes = writes
        self.store = RunStore(directory.checkpoints)
        self.prompts_digest = prompts_digest
        self.trained: dict[Role, ActorGroup | CriticGroup] = {Role.ACTOR_ROLLOUT: roles.actor}
        if roles.critic is not None:
            self.trained[Role.CRITIC] = roles.critic
        # Whose samples are saved too; None without any that are generated ahead.
        self._rollout = roles.rollout if config.rollout.max_staleness else None
        self._ahead_files: list[Entry] = []  # of the checkpoint that is being written
        self._agree = agree
        self._clock = clock
        self._last_save = clock()
        self._scores: dict[int, float] = {}  # validation scores of the checkpoints
        self._publisher = ThreadPoolExecutor(1)
        self._waiting: Future[None] | None = None  # the checkpoint that `_publisher` publishes
        self._give_up = math.inf  # when to wait no longer for the files of ranks
        self.write_s = 0.0  # seconds of the last asynchronous write, beside an iteration
        self.newest = 0  # iteration of the newest complete checkpoint of this process; 0 = none
        self.on_publish: Callable[[int], None] = lambda _: None  # called with `newest`

    def is_due(self, iteration: int, stops: bool = False) -> bool:
        """Return whether to save after this iteration.

        Saves are due after the last iteration (or if the run `stops`), every `save_interval`
        iterations, and `seconds_between_saves` after the last save or process start; 0 disables
        either one.
        """
        training = self.config.training
        is_last = stops or iteration == training.train_iters
        is_multiple = training.save_interval > 0 and iteration % training.save_interval == 0
        since_last_save_s = self._clock() - self._last_save
        is_time = 0 < training.seconds_between_saves <= since_last_save_s
        return is_last or is_multiple or is_time

    def write(self, iteration: int, note: Note) -> float:
        """Let all ranks write a checkpoint to a hidden folder; return the seconds taken.

        Finishes an earlier asynchronous save first (its time does not count) and removes unfinished
        checkpoints. With `async_save` the ranks write the files later.
        """
        self.settle(note)
        started = time.monotonic()
        with phase(f"writing the checkpoint of iteration {iteration}", prints=False):
            hidden = self.store.hidden(iteration)
            self._give_up = math.inf
            if self.writes:
                self.store.begin(iteration)
            calls = []
            for role, role_group in self.trained.items():
                folder = hidden / SAVED_AS[role]
                calls.append(role_group.group.call_engine(TrainEngine.begin_save, folder))
            for call in calls:  # until the ranks have copied their state in memory
                call.result()
            self._ahead_files = self._write_ahead(hidden / AHEAD)
            if not self.config.training.async_save:
                self._wait_for_ranks()
        return time.monotonic() - started

    def _write_ahead(self, folder: Path) -> list[Entry]:
        """Let the generating ranks write what is drawn and not trained; return the files."""
        if self._rollout is None:
            return []
        if self.writes:
            folder.mkdir(parents=True, exist_ok=True)  # another process's leader may be first
        reports = self._rollout.save_ahead(folder).result()
        return [entry for report in reports for entry in report]

    def commit(
        self, iteration: int, state: dict[str, Any], score: float | None, note: Note
    ) -> None:
        """Add the driver's state and publish the checkpoint; with `async_save` in the background.

        Fsyncs the line files first, because their lengths are part of the state. `score` is the
        value of `validation.best_metric`, None if not validated.
        """
        self._last_save = self._clock()
        content = {
            "iteration": iteration,
            "trainer": state,
            "positions": line_positions(self.directory),
            "prompts_digest": self.prompts_digest,
            "score": score,
            "score_metric": self.config.validation.best_metric,
        }
        self._waiting = self._publisher.submit(self._publish, content)
        if not self.config.training.async_save:
            self.settle(note)

    def settle(self, note: Note) -> None:
        """Wait until an asynchronous save in progress is published; return at once without one."""
        if self._waiting is not None:
            if self._give_up == math.inf:
                self._wait_for_ranks()
            publication = self._waiting
            self._waiting = None  # first, so that an error is raised only once
            publication.result()
            if self.writes:
                note(f"checkpoint of iteration {self.newest}: {self.store.path(self.newest)}")

    def close(self) -> None:
        """End an asynchronous save; it is published only if all ranks have already written."""
        self._give_up = 0.0
        self._publisher.shutdown()

    def _wait_for_ranks(self) -> None:
        calls = []
        for role_group in self.trained.values():
            calls.append(role_group.group.call_engine(TrainEngine.end_save))
        seconds = max(call.result()[0] for call in calls)
        if self.config.training.async_save:
            self.write_s = seconds
        self._give_up = time.monotonic() + SEEN_WITHIN_S

    def _publish(self, content: dict[str, Any]) -> None:
        if self.writes:
            self._write_and_commit(content)
        self.newest = content["iteration"]
        self.on_publish(self.newest)

    def _write_and_commit(self, content: dict[str, Any]) -> None:
        """Wait for all ranks, write the driver's files and the manifest, and rename the folder.

        Then removes old checkpoints and updates the pointer files.
        """
        iteration = content["iteration"]
        hidden = self.store.hidden(iteration)
        layouts = {SAVED_AS[role]: self.config.layout(role) for role in self.trained}
        self._wait_for_files(hidden, layouts)
        files: list[Entry] = []
        for name, layout in layouts.items():
            index = merge_rank_indexes(hidden / name, layout.world_size)
            files += under(name, [index])
        files += under(AHEAD, self._ahead_files)
        lock.require(self.directory.path)
        texts = {
            f"{TRAINER}/{STATE}": json.dumps(content, indent=1),
            f"{TRAINER}/{CONFIG}": to_yaml(self.config),
        }
        for path, text in texts.items():
            write_text(hidden / path, text)
        files += [entry_of(hidden, hidden / path) for path in texts]
        about = {
            "versions": {
                "mindspeed_rlxf": mindspeed_rlxf.__version__,
                "python": platform.python_version(),
                **{n: packages.version(n) for n in ("torch", packages.MEGATRON, "ray", "numpy")},
            },
            "layouts": {
                name: {"world_size": layout.world_size, "tp": layout.tp, "pp": layout.pp}
                for name, layout in layouts.items()
            },
        }
        self.store.commit(Manifest(iteration, files, about))
        self._note_score(content)
        best = self._find_best()
        self.store.point(BEST, best)
        training = self.config.training
        self.store.prune(training.keep_last, training.keep_every, best)

    def _wait_for_files(self, hidden: Path, layouts: Mapping[str, ParallelLayout]) -> None:
        """Wait until this host sees the files of all ranks; RuntimeError after `_give_up`."""
        while True:
            incomplete = []
            for name, layout in layouts.items():
                if not has_rank_indexes(hidden / name, layout.world_size):
                    incomplete.append(name)
            if not incomplete:
                return
            if time.monotonic() > self._give_up:
                raise RuntimeError(
                    f"{hidden} must have the files of all ranks of {' and '.join(incomplete)}; is "
                    "it the same folder on every node?"
                )
            time.sleep(0.2)

    def _note_score(self, state: dict[str, Any]) -> None:
        is_same_metric = state["score_metric"] == self.config.validation.best_metric
        if is_same_metric and state["score"] is not None and math.isfinite(state["score"]):
            self._scores[state["iteration"]] = state["score"]

    def _find_best(self) -> int | None:
        scores = self._scores  # the earliest of equals
        return max(scores, key=lambda n: (scores[n], -n)) if scores else None

    def restore(self, note: Note) -> dict[str, Any] | None:
        """Load the newest undamaged checkpoint, or that of `training.resume_from`, into the roles.

        Truncates line files to their checkpointed length (else 0), drops later iterations from
        token files, removes unfinished checkpoints. Renames later ones; with `training.resume_from`
        they are set aside, with copies of the line files.

        Args:
            note: Prints a line per skipped checkpoint, and the one resumed from.

        Returns:
            The driver's state; None without checkpoints.

        Raises:
            UserError: The prompts differ, or all checkpoints are damaged.
            StorageUnreadable: Files cannot be read; nothing is changed.
        """
        resume_from = self.config.training.resume_from
        chosen = self.store.goes_back_to(self.config.training)
        if resume_from is not None and chosen is None and not self.config.training.new_run:
            file = self.store.folder / WENT_BACK
            note(
                f"note: an earlier start went back to training.resume_from={resume_from}, so this "
                f"one goes on; remove {file} to go back again"
            )
        older, loaded = self._load_first(note, resumes=True, chosen=chosen)
        if older and self._rollout is not None:
            self._load_ahead(older[0], note)
        for checkpoint in older:
            self._note_score(checkpoint.state)
        state = older[0].state if older else None
        iteration = state["iteration"] if state else 0
        positions = state["positions"] if state else {}
        if self.writes:
            self.store.clear_unfinished()
            self._set_newer_aside(iteration, chosen is not None, note)
            if chosen is not None:
                self.store.point(EXPORTED, None)  # the final weights will be others
            self.store.point(WENT_BACK, resume_from)
            self.store.point(POINTER, iteration or None)
            self.store.point(BEST, self._find_best())
            if not older and any(line_positions(self.directory).values()):
                note("no checkpoint to resume from: starting again from iteration 0")
            cut_files(self.directory, positions)
            cut_token_files(self.directory.samples_tokens, iteration)
        if older:
            self.newest = iteration
            note(f"resumed from {older[0].path}; its weights replace those of `load`")
        if not loaded.same_layout:
            note(
                "note: the layout or the kind of device has changed; weights, optimizer and data "
                "continue exactly, the random streams of the ranks start from the seed"
            )
        return state

    def _load_ahead(self, checkpoint: Checkpoint, note: Note) -> None:
        """Let the generating ranks read what was drawn and not trained.

        Without its files these samples are drawn again, from the position of training on.
        """
        assert self._rollout is not None, "something is generated ahead"
        folder = checkpoint.path / AHEAD
        files = entries_below(AHEAD, checkpoint.read().files)
        damage = find_damage(folder, files) if files else ["its samples were not saved"]
        damage = self._agree(damage)  # ranks that see other files must not draw other samples
        if damage:
            checkpoint.state["trainer"].pop("stream", None)
            note(f"note: {folder}: {'; '.join(damage)}; responses generated ahead are drawn again")
            return
        self._rollout.load_ahead(folder).result()

    def _set_newer_aside(self, iteration: int, goes_back: bool, note: Note) -> None:
        """Set aside the checkpoints after `iteration`; all together if the user `goes_back`."""
        if goes_back:
            copied = [self.directory.config, *self.directory.line_files]
            aside = self.store.set_aside_after(iteration, copied)
            if aside is not None:
                note(f"note: checkpoints after iteration {iteration} and their records: {aside}")
            return
        for checkpoint in self.store.newest_first():
            if checkpoint.iteration > iteration:
                name = checkpoint.path.name
                renamed = self.store.move_aside(checkpoint)
                note(f"note: {name} is not resumed from; renamed to {renamed.name}")

    def load_newest(self, note: Note, chosen: int | None = None) -> int:
        """Load the newest usable checkpoint into the roles; return its iteration, 0 without any.

        For commands beside the run: changes nothing in the run directory. Notes the loaded folder,
        and a warning per unusable checkpoint. With `chosen` it is the checkpoint of that iteration.
        Raises UserError if none can be loaded.
        """
        older, _ = self._load_first(note, resumes=False, chosen=chosen)
        if not older:
            return 0
        note(f"weights of {older[0].path}")
        return older[0].iteration

    def _load_first(
        self, note: Note, resumes: bool, chosen: int | None = None
    ) -> tuple[list[Checkpoint], Loaded]:
        """Load the newest usable checkpoint; return it with all older ones, and how it was loaded.

        To resume (`resumes`), the prompts must be the run's and no line file may be shorter than at
        the checkpoint. With `chosen` only the checkpoint of that iteration is tried. Raises
        UserError for other prompts, or if none can be loaded.
        """
        complete, problems = find_whole_checkpoints(self.config, self.store)
        if chosen is not None:
            problems = []  # of others
        for index, checkpoint in enumerate(complete):
            if chosen is not None and checkpoint.iteration != chosen:
                continue
            if resumes:
                shortened = find_shortened_file(self.directory, checkpoint.state["positions"])
                if shortened:
                    problems.append(f"{checkpoint.path} cannot be resumed from: {shortened}")
                    continue
            if resumes and checkpoint.state["prompts_digest"] != self.prompts_digest:
                rule = f"must give the prompts of the run in {self.directory.path}, with this "
                rule += "tokenizer they are others"
                remedy = "put files and tokenizer back, or set training.new_run=true"
                raise UserError(Problem("data.train_files", rule, remedy=remedy))
            loaded = self._load_roles(checkpoint.path)
            if not loaded.problem:
                for problem in problems:
                    note(f"warning: {problem}; resuming from an older checkpoint")
                return complete[index:], loaded
            problems.append(loaded.problem)
        if chosen is not None and not problems:
            problems = [f"{self.store.path(chosen)} is missing or damaged"]
        if problems:  # a new start would remove the checkpoints and records
            raise UserError(no_whole_checkpoint(self.directory, problems))
        return [], Loaded()

    def _load_roles(self, path: Path) -> Loaded:
        calls = []
        for role, role_group in self.trained.items():
            folder = path / SAVED_AS[role]
            calls.append(role_group.group.call_engine(TrainEngine.load_state, folder))
        ranks: list[Loaded] = []
        for call in calls:
            ranks += call.result()
        unreadable = [rank.unreadable for rank in ranks if rank.unreadable]
        if unreadable:
            raise StorageUnreadable(f"{path} cannot be read: {'; '.join(unreadable)}")
        problems = dict.fromkeys(rank.problem for rank in ranks if rank.problem)  # each once
        if problems:
            return Loaded(f"{path} cannot be resumed from: {'; '.join(problems)}")
        return Loaded(same_layout=all(rank.same_layout for rank in ranks))

    def export_weights(self) -> None:
        """Export the trained roles to `export_folders`, replacing them; mark the run finished."""
        if self.writes:
            self.store.point(EXPORTED, None)
        exports = []
        for role, role_group in self.trained.items():
            folders = export_folders(self.config, role, self.directory.path / "final")
            for folder in folders:
                if self.writes and folder is not None and folder.exists():
                    shutil.rmtree(folder)
            exports.append(role_group.group.call_engine(TrainEngine.export, *folders))
        for export in exports:
            export.result()
        if self.writes:
            self.store.point(EXPORTED, self.config.training.train_iters)
