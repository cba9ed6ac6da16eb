"""Generate and score the samples of each iteration, in slices and ahead of training."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from mindspeed_rlxf.algorithms.advantages import shape_scores
from mindspeed_rlxf.algorithms.estimators import groups_that_differ
from mindspeed_rlxf.cluster.group import RoleFuture
from mindspeed_rlxf.cluster.refs import RowsRef
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.batch import Prompts
from mindspeed_rlxf.data.sampler import ConsumedPrompts
from mindspeed_rlxf.roles.all_roles import RoleGroups
from mindspeed_rlxf.roles.reports import GenerateReport, ResponseLengths, ScoreReport
from mindspeed_rlxf.roles.reward import check_failures
from mindspeed_rlxf.roles.rollout import Sampling
from mindspeed_rlxf.trainer.prompt_source import PromptSource
from mindspeed_rlxf.trainer.stream import Group, GroupBatch, GroupStream

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Scored:
    """Groups whose rows were taken from the generating ranks, and the call that scores them."""

    groups: list[Group]
    taken: RoleFuture
    scored: RoleFuture

    def lengths(self) -> ResponseLengths:
        """Wait for the rows; return each sample's lengths and EOS flag."""
        reports = self.taken.result()
        return ResponseLengths(
            _joined(self.taken, (report.prompt_lengths for report in reports)),
            _joined(self.taken, (report.response_lengths for report in reports)),
            _joined(self.taken, (report.has_eos for report in reports)),
        )

    def report(self) -> ScoreReport:
        """Wait for the scores; return each sample's score, parts and failure.

        Parts and failures are [] if there were none; answers are left out.
        """
        reports = self.scored.result()
        parts = [report.parts for report in reports]
        failures = [report.failures for report in reports]
        return ScoreReport(
            _joined(self.scored, (report.scores for report in reports)),
            _joined(self.scored, parts) if any(parts) else [],
            _joined(self.scored, failures) if any(failures) else [],
        )


@dataclass(frozen=True, eq=False)
class Samples:
    """The samples that an iteration trains.

    Attributes:
        batch: Their groups, and those that were dropped on the way.
        taken: The call that brings their rows.
        scored: Calls that score them, and possibly others.
        rows: Of each trained sample among all that `scored` score.
        passed_rows: Likewise of each sample in `batch.passed`.
        consumed: Prompts that the iteration passes.
        greedy: For ReMax, the greedy responses: one for each group.
    """

    batch: GroupBatch
    taken: RoleFuture
    scored: list[Scored]
    rows: list[int]
    passed_rows: list[int]
    consumed: ConsumedPrompts
    greedy: Scored | None = None

    @property
    def rollouts(self) -> RowsRef:
        """References to the samples' rows in the workers."""
        return self.taken.rows()

    @property
    def scores(self) -> RowsRef:
        """References to their scores."""
        return RowsRef.concat([each.scored.rows() for each in self.scored]).take(self.rows)

    @property
    def greedy_rows(self) -> tuple[RowsRef, RowsRef] | None:
        """For ReMax, the row and the score of the greedy response to each sample's prompt."""
        if self.greedy is None:
            return None
        size = len(self.rows) // len(self.batch.groups)
        rows = [row // size for row in range(len(self.rows))]
        return self.greedy.taken.rows().take(rows), self.greedy.scored.rows().take(rows)

    @property
    def prompts(self) -> Prompts:
        """The prompts, a row for each sample."""
        return Prompts.concat([group.prompts for group in self.batch.groups])

    def responses(self) -> ResponseLengths:
        """Wait for the responses; return the samples' lengths and EOS flags."""
        reports = self.taken.result()
        return ResponseLengths(
            _joined(self.taken, (report.prompt_lengths for report in reports)),
            _joined(self.taken, (report.response_lengths for report in reports)),
            _joined(self.taken, (report.has_eos for report in reports)),
        )

    def oldest_versions(self) -> list[int]:
        """Wait for the responses; return the oldest weights version among each sample's tokens."""
        reports = self.taken.result()
        return _joined(self.taken, (report.oldest_versions for report in reports))

    def score_report(self) -> ScoreReport:
        """Wait for the scores; return the samples' scores, parts and failures (`Scored.report`)."""
        reports = [each.report() for each in self.scored]
        counts = [len(report.scores) for report in reports]
        parts = _fill_columns([report.parts for report in reports], counts, dict)
        failures = _fill_columns([report.failures for report in reports], counts, lambda: None)
        scores = [score for report in reports for score in report.scores]
        return ScoreReport(
            [scores[row] for row in self.rows],
            [parts[row] for row in self.rows] if parts else [],
            [failures[row] for row in self.rows] if failures else [],
        )

    def non_finite_scores(self) -> dict[int, float]:
        """Wait for the scores; return the non-finite ones by sample id.

        With ReMax also those of greedy responses, identified by their prompt's first sample. A
        sample's own score takes precedence.
        """
        ids, scores = self.sample_ids(), self.score_report().scores
        if self.greedy:
            ids = [group.first_id for group in self.greedy.groups] + ids
            scores = self.greedy.report().scores + scores
        return {i: s for i, s in zip(ids, scores, strict=True) if not math.isfinite(s)}

    def sample_ids(self) -> list[int]:
        """Return the samples' ids, in the order of `rollouts`, without waiting."""
        return [i for group in self.batch.groups for i in group.prompts.sample_ids]

    def passed_ids(self) -> list[int]:
        """Return the ids of all samples that the iteration passes, dropped ones included."""
        return [i for group in self.batch.passed for i in group.prompts.sample_ids]

    def generate_reports(self) -> list[GenerateReport]:
        """Wait for generation; return its reports, with the lengths of dropped samples too.

        Greedy ReMax responses are not in the reports.
        """
        reports: list[GenerateReport] = self.taken.result()
        if len(self.passed_rows) == len(self.rows):
            return reports
        lengths = [each.lengths() for each in self.scored]
        prompts = [n for each in lengths for n in each.prompts]
        responses = [n for each in lengths for n in each.responses]
        passed = replace(
            reports[0],
            prompt_lengths=[prompts[row] for row in self.passed_rows],
            response_lengths=[responses[row] for row in self.passed_rows],
        )
        return [passed]

    def data_sources(self) -> list[str]:
        """Return each sample's data source, without waiting."""
        return self.prompts.data_sources

    def sample_fields(self) -> list[dict[str, Any]]:
        """Return each sample's data source, ground truth and other columns (`Sample`)."""
        prompts = self.prompts
        return [
            {"data_source": source, "ground_truth": truth, "extra_info": columns}
            for source, truth, columns in zip(
                prompts.data_sources, prompts.ground_truths, prompts.extra_infos, strict=True
            )
        ]


class SampleStream:
    """Generates and scores samples, from drawn prompts to the samples of each iteration.

    With `rollout.max_staleness` 0 an iteration's prompts are drawn, and a slice runs until nothing
    is left. Else all generating ranks run `rollout.slice_steps` decode steps at a time, until the
    next batch is complete, while prompts of later batches are generated beside it. After a batch,
    unfinished responses leave the engine, and go on in the next slice.

    With `algorithm.filter_groups` the scores of the responses that ended in a slice are read after
    the next one (with `max_staleness` 0 at once): what is drawn depends on them, and never on when
    they arrive.
    """

    def __init__(self, config: RunConfig, roles: RoleGroups, prompts: PromptSource) -> None:
        self.config, self.algorithm = config, config.algorithm
        self.rollout, self.reward, self.prompts = roles.rollout, roles.reward, prompts
        self.seed = config.training.seed
        self.group_size = config.actor_rollout.n_samples_per_prompt
        self.batch_size = config.training.global_batch_size
        self.staleness = config.rollout.max_staleness
        self.in_slices = config.rollout.runs_slices
        # A failed server leaves responses unfinished, even where a slice has no end.
        self._reads_slices = self.in_slices or config.runs_vllm
        most = self.algorithm.max_num_gen_batches
        self.stream = GroupStream(
            self.batch_size,
            self.staleness - config.lead + 1,
            self.algorithm.filter_groups,
            most * self.batch_size if most and self.algorithm.filter_groups else None,
        )
        # ReMax's greedy responses come with the groups, but with staleness 0 after the batch.
        self._draws_greedy = self.algorithm.estimator.reads_greedy and self.staleness > 0
        self._scored: dict[int, Scored] = {}  # by first sample id, of groups in the stream
        self._due: list[Group] = []  # ended in the last slice, scores are read after the next one
        self._calls: dict[str, list[RoleFuture]] = {"gen": [], "reward": []}
        self._takes: list[RoleFuture] = []  # calls that took rows since `pop_sync_s`
        self._slice: RoleFuture | None = None  # the last one
        self.ended = time.time()  # end of the last slice, epoch seconds

    def generate(self, batches_left: int) -> bool:
        """Run slices until the next batch is complete; `batches_left` are still to be trained.

        Does nothing if it is complete. Waits for each slice, but with staleness 0, without servers,
        for nothing except scores with `filter_groups`. Returns False if a server has failed: then
        the rest is asked for in the next call, after the weights are sent again.
        """
        steps = self.config.rollout.slice_steps if self.in_slices else None
        self._draw(batches_left)
        has_run = False
        while self.stream.find_batch() is None:
            self._slice = self._note(self.rollout.advance(steps))
            self._note_slice(self._slice)
            has_run = True
            if self.rollout.server_has_failed:
                break
            if self.stream.find_batch() is None:
                self._draw(batches_left)
        if has_run and (self.staleness or self.rollout.server_has_failed):
            self._note(self.rollout.withdraw())
        self.ended = time.time()
        return not self.rollout.server_has_failed

    def next_samples(self) -> Samples:
        """Take the next batch, which is complete, and start to score it if that has not begun.

        The generating ranks then forget its samples and the dropped ones before them.
        """
        batch = self.stream.find_batch()
        assert batch is not None, "generate() comes first"
        self.stream.pop(batch)
        if self.algorithm.filter_groups:
            scored = self._pop_scored(batch)
            rows, passed_rows = _find_rows(scored, batch.groups), _find_rows(scored, batch.passed)
            self._check_failures(scored, passed_rows)
            ids = [i for group in batch.groups for i in group.prompts.sample_ids]
            taken = self._take(ids, Sampling.TRAINING)
        else:
            scored = [self._score(batch.groups)]
            rows = passed_rows = list(range(len(batch.groups) * self.group_size))
            taken = scored[0].taken
        greedy = self._find_greedy(batch.groups)
        if self.config.rollout.runs_agents:
            for call in [taken, *([greedy.taken] if greedy is not None else [])]:
                self._check_agents(call)
        consumed = self.prompts.consume(len(batch.passed))
        samples = Samples(batch, taken, scored, rows, passed_rows, consumed, greedy)
        self._note(self.rollout.forget(samples.passed_ids()))
        return samples

    def pop_calls(self) -> dict[str, list[RoleFuture]]:
        """Return the generation (`gen`) and scoring (`reward`) calls since the last time.

        A batch that was complete when it was asked for may need no scoring.
        """
        calls, self._calls = self._calls, {"gen": [], "reward": []}
        return {name: calls[name] for name in ("gen", "reward") if calls[name] or name == "gen"}

    def pop_sync_s(self) -> float:
        """Return the seconds the slowest replica waited for weights, since the last time.

        Includes the rollout engine's wake-up. Waits for the calls that took rows.
        """
        takes, self._takes = self._takes, []
        reports = [call.result() for call in takes]
        return sum(max(float(report.sync_s) for report in of_call) for of_call in reports)

    def metrics(self, samples: Samples) -> dict[str, float]:
        """Return the batches' worth of prompts passed, and of prompts kept with all scores equal.

        As `rollout/gen_batches` and `rollout/alike_groups`; {} without `filter_groups`.
        """
        if not self.algorithm.filter_groups:
            return {}
        return {
            "rollout/gen_batches": len(samples.batch.passed) / self.batch_size,
            "rollout/alike_groups": float(samples.batch.num_equal),
        }

    def _note(self, call: RoleFuture) -> RoleFuture:
        self._calls["gen"].append(call)
        return call

    def _draw(self, batches_left: int) -> None:
        """Draw the missing groups and add them to the engine's queue."""
        missing = self.stream.num_missing(batches_left)
        if not missing:
            return
        prompts = self.prompts.next_groups(missing)
        self._note(self.rollout.add(prompts, self.seed, Sampling.TRAINING))
        size = self.group_size
        for first in range(0, prompts.num_rows, size):
            rows = prompts.select(range(first, first + size))
            self.stream.add([Group.draw(rows, self._draws_greedy)])

    def _note_slice(self, call: RoleFuture) -> None:
        """Note what a slice has ended; with `filter_groups` also whose scores are equal."""
        ended = self._note_ended(call) if self._reads_slices else self._end_everything()
        if not self.algorithm.filter_groups:
            return
        due, self._due = (self._due, ended) if self.staleness else (ended, [])
        if due:  # whose scoring began when they ended; asked for sooner, the next slice would wait
            self._read(self._score(due))

    def _end_everything(self) -> list[Group]:
        """Note that nothing is left, without waiting; return the groups that have ended by it."""
        ended = [group for group in self.stream.groups if not group.has_ended]
        for group in ended:
            group.unfinished.clear()
        return ended

    def _note_ended(self, call: RoleFuture) -> list[Group]:
        """Note what a slice has ended; return the groups that have, in the stream's order.

        Asks for greedy responses where all samples have ended.
        """
        answered: list[Group] = []
        ended: list[Group] = []
        for report in call.result():
            for sample_id, sampling, *_ in report.ended:
                group = self.stream.find(sample_id)
                is_greedy = Sampling(sampling) is Sampling.GREEDY
                if group is None or not group.note_ended(sample_id, is_greedy):
                    continue
                if group.has_ended:
                    ended.append(group)
                elif group.has_samples:
                    answered.append(group)
        self._add_greedy(sorted(answered, key=lambda group: group.first_id))
        return sorted(ended, key=lambda group: group.first_id)

    def _add_greedy(self, groups: Sequence[Group]) -> None:
        if groups:
            prompts = _first_prompts(groups)
            self._note(self.rollout.add(prompts, self.seed, Sampling.GREEDY))

    def _score(self, groups: list[Group]) -> Scored:
        """Take the rows of groups, and start to score them."""
        ids = [i for group in groups for i in group.prompts.sample_ids]
        scored = self._start_scoring(groups, self._take(ids, Sampling.TRAINING))
        if self.algorithm.filter_groups:
            self._scored |= {group.first_id: scored for group in groups}
        return scored

    def _take(self, sample_ids: list[int], sampling: Sampling) -> RoleFuture:
        taken = self._note(self.rollout.take(sample_ids, sampling))
        if self._slice is not None:
            taken.after(self._slice)  # so that an error of generation is named as its own
        self._takes.append(taken)
        return taken

    def _start_scoring(self, groups: list[Group], taken: RoleFuture) -> Scored:
        is_batch = not self.algorithm.filter_groups
        scored = self.reward.score(taken.rows(), is_batch)
        self._calls["reward"] += scored.with_earlier()
        return Scored(groups, taken, scored)

    def _read(self, scored: Scored) -> None:
        """Wait for scores, and note which groups have equal scores, as in DAPO.

        arXiv:2503.14476, section 3.2. Scores are compared after shaping; penalties (missing EOS,
        length, KL) do not count, because any two responses differ in them, nor do unscored
        responses.
        """
        report, keys = scored.report(), self.algorithm
        given = torch.tensor(report.scores)
        seen = shape_scores(given, keys.reward_scale, keys.reward_clip).tolist()
        differing = groups_that_differ(seen, report.is_scored, self.group_size)
        for number, group in enumerate(scored.groups):
            self.stream.note_scores(group, number not in differing)

    def _check_failures(self, scored: Sequence[Scored], passed_rows: Sequence[int]) -> None:
        """Raise RewardsFailed if too many of a batch, dropped samples included, have no score."""
        reports = [each.report() for each in scored]
        counts = [len(report.scores) for report in reports]
        failures = _fill_columns([report.failures for report in reports], counts, lambda: None)
        if failures:
            passed_failures = [failures[row] for row in passed_rows]
            check_failures(passed_failures, self.config.reward.max_failed)

    def _check_agents(self, taken: RoleFuture) -> None:
        """Wait for rows; raise RewardsFailed if the agents of too many have failed."""
        failures = [failure for report in taken.result() for failure in report.agent_failures]
        check_failures(failures, self.config.reward.max_failed)

    def _pop_scored(self, batch: GroupBatch) -> list[Scored]:
        """Return the calls that scored a batch, each once, and forget them for its groups."""
        calls = [self._scored.pop(group.first_id) for group in batch.passed]
        return list(dict.fromkeys(calls))

    def _find_greedy(self, groups: list[Group]) -> Scored | None:
        """Return the greedy responses to the prompts, for ReMax; with staleness 0 start them."""
        if not self.algorithm.estimator.reads_greedy:
            return None
        if self._draws_greedy:
            ids = [group.first_id for group in groups]
            taken = self._take(ids, Sampling.GREEDY)
        else:
            prompts = _first_prompts(groups)
            taken = self._note(self.rollout.generate(prompts, self.seed, Sampling.GREEDY))
            self._takes.append(taken)
        return self._start_scoring(groups, taken)

    def state_dict(self) -> dict[str, Any]:
        """Return what has ended and is scored of the groups drawn and not trained (JSON)."""
        return self.stream.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Draw the groups of `state_dict` again; the generating ranks know what had been drawn.

        Comes after the prompts' position and the ranks' `load_ahead`.
        """
        count = len(state["groups"])
        if not count:
            return
        prompts = self.prompts.next_groups(count)
        self.stream.load_state_dict(state, prompts)
        groups = list(self.stream.groups)
        self._note(self.rollout.add(prompts, self.seed, Sampling.TRAINING))
        if self._draws_greedy:
            self._add_greedy([group for group in groups if group.has_samples])
        if not self.algorithm.filter_groups:
            return
        known = [group for group in groups if group.has_equal_scores is not None]
        if known:
            self._score(known)
        self._due = [
            group for group in groups if group.has_ended and group.has_equal_scores is None
        ]


def _find_rows(scored: Sequence[Scored], groups: Sequence[Group]) -> list[int]:
    """Return the row of each sample of the groups among the rows of all `scored`."""
    rows_by_id: dict[int, int] = {}
    for each in scored:
        for group in each.groups:
            for sample_id in group.prompts.sample_ids:
                rows_by_id[sample_id] = len(rows_by_id)
    return [rows_by_id[i] for group in groups for i in group.prompts.sample_ids]


def _joined(call: RoleFuture, columns: Iterable[Sequence[T]]) -> list[T]:
    """Return one value for each row of a call, in the order of its rows."""
    return call.in_order([value for column in columns for value in column])


def _fill_columns(
    columns: Sequence[Sequence[Any]], counts: Sequence[int], empty: Callable[[], Any]
) -> list[Any]:
    """Join columns, of which some may be [] for rows without values; [] if all are."""
    if not any(columns):
        return []
    joined: list[Any] = []
    for column, count in zip(columns, counts, strict=True):
        joined += column or [empty() for _ in range(count)]
    return joined


def _first_prompts(groups: Sequence[Group]) -> Prompts:
    """Return a row for each group, without a fixed response, which is none of a greedy one."""
    rows = Prompts.concat([group.prompts.select([0]) for group in groups])
    return replace(rows, responses=[[]] * rows.num_rows)
