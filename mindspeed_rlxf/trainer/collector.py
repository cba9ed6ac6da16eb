"""Collect the samples of an iteration: generate, score, and with dynamic sampling draw again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from mindspeed_rlxf.algorithms.groups import groups_that_differ
from mindspeed_rlxf.cluster.group import Pending
from mindspeed_rlxf.cluster.refs import RowsRef
from mindspeed_rlxf.cluster.role_groups import RoleGroups
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.batch import Prompts
from mindspeed_rlxf.rewards.shaping import ScoreShaping
from mindspeed_rlxf.roles.reports import GenerateReport, ResponseLengths, ScoreReport
from mindspeed_rlxf.trainer.prompt_source import PromptSource

T = TypeVar("T")


@dataclass(frozen=True)
class Batch:
    """A global batch of prompts, with its pending responses and scores."""

    prompts: Prompts
    generated: Pending
    scored: Pending

    def scores(self) -> list[float]:
        """Wait for the scores; return them by sample."""
        return [score for report in self.scored.result() for score in report.scores]


@dataclass(frozen=True)
class Collected:
    """The samples of an iteration.

    rollouts, scores:      references to their rows
    batches:               the batches that were generated for them
    kept:                  indices of the samples among those of `batches`; None = all
    num_alike:             groups kept although all their scores are equal
    greedy, greedy_scores: for ReMax, rows of the greedy response to each sample's prompt
    greedy_batch:          the batch of the greedy responses
    """

    rollouts: RowsRef
    scores: RowsRef
    batches: list[Batch]
    kept: list[int] | None = None
    num_alike: int = 0
    greedy: RowsRef | None = None
    greedy_scores: RowsRef | None = None
    greedy_batch: Batch | None = None

    def responses(self) -> ResponseLengths:
        """Wait for the responses; return their lengths and whether they ended by EOS."""
        reports = self.generate_reports()
        return ResponseLengths(
            self._chosen(report.prompt_lengths for report in reports),
            self._chosen(report.response_lengths for report in reports),
            self._chosen(report.has_eos for report in reports),
        )

    def score_report(self) -> ScoreReport:
        """Wait for the scores of the samples; return them with their parts."""
        reports = [report for batch in self.batches for report in batch.scored.result()]
        return ScoreReport(
            self._chosen(report.scores for report in reports),
            self._chosen(report.parts for report in reports) if reports[0].parts else [],
            self._chosen(report.failures for report in reports) if reports[0].failures else [],
        )

    def non_finite_scores(self) -> dict[int, float]:
        """Return sample id -> score where it is NaN or inf, greedy responses of ReMax included."""
        ids = self._chosen(report.sample_ids for report in self.generate_reports())
        scores = self.score_report().scores
        if self.greedy_batch:
            reports = self.greedy_batch.generated.result()
            ids = [i for report in reports for i in report.sample_ids] + ids
            scores = self.greedy_batch.scores() + scores
        return {i: s for i, s in zip(ids, scores, strict=True) if not math.isfinite(s)}

    def sample_ids(self) -> list[int]:
        """Return the ids of the samples, in the order of `rollouts`; waits for nothing."""
        return self._chosen(batch.prompts.sample_ids for batch in self.batches)

    def generate_reports(self) -> list[GenerateReport]:
        """Wait for the reports of all batches, samples that were not kept included."""
        return [report for batch in self.batches for report in batch.generated.result()]

    def data_sources(self) -> list[str]:
        """Wait for the responses; return the data source of each."""
        return self._chosen(report.data_sources for report in self.generate_reports())

    def calls(self) -> dict[str, list[Pending]]:
        """Return the calls by phase: `gen`, `reward`."""
        batches = self._all_batches()
        return {
            "gen": [batch.generated for batch in batches],
            "reward": [batch.scored for batch in batches],
        }

    def sync_s(self) -> float:
        """Return the seconds that generation waited for weights."""
        calls = [batch.generated for batch in self._all_batches()]
        return sum(max(float(report.sync_s) for report in call.result()) for call in calls)

    def _all_batches(self) -> list[Batch]:
        return self.batches + ([self.greedy_batch] if self.greedy_batch else [])

    def _chosen(self, columns: Iterable[Sequence[T]]) -> list[T]:
        everything = [item for column in columns for item in column]
        return everything if self.kept is None else [everything[row] for row in self.kept]


class Collector:
    """Generate and score; with `algorithm.filter_groups` until enough groups differ in score."""

    def __init__(self, config: RunConfig, roles: RoleGroups, prompts: PromptSource) -> None:
        self.config, self.algorithm = config, config.algorithm
        self.rollout, self.reward, self.prompts = roles.rollout, roles.reward, prompts
        self.group_size = config.actor_rollout.n_samples_per_prompt
        self.shaping = ScoreShaping(config)

    def collect(self) -> Collected:
        """Start the calls of an iteration; wait for scores only to filter groups."""
        found = self._filter_groups() if self.algorithm.filter_groups else self._one_batch()
        return self._add_greedy(found) if self.algorithm.estimator.reads_greedy else found

    def metrics(self, found: Collected) -> dict[str, float]:
        """Return counts of dynamic sampling, {} without it.

        They are the generated batches, and the groups kept although their scores are all equal.
        """
        if not self.algorithm.filter_groups:
            return {}
        return {
            "rollout/gen_batches": float(len(found.batches)),
            "rollout/alike_groups": float(found.num_alike),
        }

    def _start_batch(self, prompts: Prompts, greedy: bool = False) -> Batch:
        generated = self.rollout.generate(prompts, self.config.training.seed, greedy)
        return Batch(prompts, generated, self.reward.score(generated.rows()))

    def _one_batch(self) -> Collected:
        batch = self._start_batch(self.prompts.next_prompts())
        return Collected(batch.generated.rows(), batch.scored.rows(), [batch])

    def _filter_groups(self) -> Collected:
        """Sample dynamically as DAPO does (arXiv:2503.14476, section 3.2).

        Replaces prompts whose responses all score the same, with at most `max_num_gen_batches`
        batches; such prompts fill the batch where that is not enough. Penalties (missing EOS,
        length, KL) do not count as differences, because any two responses differ in them.
        """
        wanted, size = self.config.training.global_batch_size, self.group_size
        batches: list[Batch] = []
        differing: list[int] = []
        while len(differing) < wanted and len(batches) < self.algorithm.max_num_gen_batches:
            batches.append(self._start_batch(self.prompts.next_prompts()))
            offset = (len(batches) - 1) * wanted
            seen = self.shaping.shape(torch.tensor(batches[-1].scores()))
            differing += [offset + g for g in groups_that_differ(seen.tolist(), size)]
        alike = sorted(set(range(len(batches) * wanted)) - set(differing))
        missing = max(0, wanted - len(differing))
        groups = sorted(differing[:wanted] + alike[:missing])
        kept = [group * size + i for group in groups for i in range(size)]
        rollouts = RowsRef.concat([batch.generated.rows() for batch in batches]).take(kept)
        scores = RowsRef.concat([batch.scored.rows() for batch in batches]).take(kept)
        return Collected(rollouts, scores, batches, kept, missing)

    def _add_greedy(self, found: Collected) -> Collected:
        """Generate and score one greedy response per prompt; its samples share it."""
        size = self.group_size
        prompts = Prompts.concat([batch.prompts for batch in found.batches])
        kept = range(prompts.num_rows) if found.kept is None else found.kept
        firsts = prompts.select(kept[::size])
        batch = self._start_batch(replace(firsts, responses=[[]] * firsts.num_rows), greedy=True)
        rows = [row // size for row in range(len(kept))]
        return replace(
            found,
            greedy=batch.generated.rows().take(rows),
            greedy_scores=batch.scored.rows().take(rows),
            greedy_batch=batch,
        )
