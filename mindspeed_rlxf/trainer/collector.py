"""Collect an iteration's samples: generate and score; with `filter_groups` draw again."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from mindspeed_rlxf.algorithms.advantages import shape_scores
from mindspeed_rlxf.algorithms.estimators import groups_that_differ
from mindspeed_rlxf.cluster.group import Pending
from mindspeed_rlxf.cluster.refs import RowsRef
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.batch import Prompts
from mindspeed_rlxf.roles.all_roles import RoleGroups
from mindspeed_rlxf.roles.reports import GenerateReport, ResponseLengths, ScoreReport
from mindspeed_rlxf.roles.rollout import Sampling
from mindspeed_rlxf.trainer.prompt_source import PromptSource

T = TypeVar("T")


@dataclass(frozen=True)
class Batch:
    """A global batch of prompts, with the running calls generating and scoring responses."""

    prompts: Prompts
    generated: Pending
    scored: Pending

    def scores(self) -> list[float]:
        """Wait for the scores; return them in sample order."""
        return [score for report in self.scored.result() for score in report.scores]


@dataclass(frozen=True)
class Collected:
    """An iteration's samples.

    Attributes:
        rollouts: References to the samples' rows in the workers.
        scores: References to their scores.
        batches: All generated batches.
        kept: Indices of the trained samples among all samples in `batches`; None = all.
        num_alike: Prompts kept although all their responses score the same.
        greedy: For ReMax, the row with the greedy response to each sample's prompt.
        greedy_scores: Its score.
        greedy_batch: The greedy responses' batch.
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
        """Wait for the responses; return the kept samples' lengths and EOS flags."""
        reports = self.generate_reports()
        return ResponseLengths(
            self._chosen(report.prompt_lengths for report in reports),
            self._chosen(report.response_lengths for report in reports),
            self._chosen(report.has_eos for report in reports),
        )

    def score_report(self) -> ScoreReport:
        """Wait for the scores; return the kept samples' scores, parts and failures.

        Parts and failures are [] if there were none; answers are left out.
        """
        reports = [report for batch in self.batches for report in batch.scored.result()]
        parts = [report.parts for report in reports]
        failures = [report.failures for report in reports]
        return ScoreReport(
            self._chosen(report.scores for report in reports),
            self._chosen(parts) if any(parts) else [],
            self._chosen(failures) if any(failures) else [],
        )

    def non_finite_scores(self) -> dict[int, float]:
        """Wait for the scores; return the non-finite ones by sample id.

        Covers kept samples, and with ReMax greedy responses, identified by their prompt's first
        sample. A sample's own score takes precedence.
        """
        ids, scores = self.sample_ids(), self.score_report().scores
        if self.greedy_batch:
            ids = self.greedy_batch.prompts.sample_ids + ids
            scores = self.greedy_batch.scores() + scores
        return {i: s for i, s in zip(ids, scores, strict=True) if not math.isfinite(s)}

    def sample_ids(self) -> list[int]:
        """Return the kept samples' ids, in the order of `rollouts`, without waiting."""
        return self._chosen(batch.prompts.sample_ids for batch in self.batches)

    def generate_reports(self) -> list[GenerateReport]:
        """Wait for generation; return each replica's reports, dropped samples included.

        Greedy ReMax responses are not in the reports.
        """
        return [report for batch in self.batches for report in batch.generated.result()]

    def data_sources(self) -> list[str]:
        """Return each kept sample's data source, without waiting."""
        return self._chosen(batch.prompts.data_sources for batch in self.batches)

    def sample_fields(self) -> list[dict[str, Any]]:
        """Return each kept sample's data source, ground truth and other columns (`Sample`)."""
        return self._chosen(
            [
                {"data_source": source, "ground_truth": truth, "extra_info": columns}
                for source, truth, columns in zip(
                    batch.prompts.data_sources,
                    batch.prompts.ground_truths,
                    batch.prompts.extra_infos,
                    strict=True,
                )
            ]
            for batch in self.batches
        )

    def calls(self) -> dict[str, list[Pending]]:
        """Return the generation (`gen`) and scoring (`reward`) calls, including ReMax's batch."""
        batches = self._all_batches()
        return {
            "gen": [batch.generated for batch in batches],
            "reward": [call for batch in batches for call in batch.scored.with_earlier()],
        }

    def sync_s(self) -> float:
        """Wait for generation; return the seconds the slowest replica waited for weights.

        Summed over all generated batches including ReMax's, each with its own slowest replica.
        Includes the rollout engine's wake-up.
        """
        calls = [batch.generated for batch in self._all_batches()]
        return sum(max(float(report.sync_s) for report in call.result()) for call in calls)

    def _all_batches(self) -> list[Batch]:
        return self.batches + ([self.greedy_batch] if self.greedy_batch else [])

    def _chosen(self, columns: Iterable[Sequence[T]]) -> list[T]:
        everything = [item for column in columns for item in column]
        return everything if self.kept is None else [everything[row] for row in self.kept]


class Collector:
    """Generates and scores each iteration's samples.

    With `algorithm.filter_groups` it draws more batches until enough prompts have responses with
    different scores.
    """

    def __init__(self, config: RunConfig, roles: RoleGroups, prompts: PromptSource) -> None:
        self.config, self.algorithm = config, config.algorithm
        self.rollout, self.reward, self.prompts = roles.rollout, roles.reward, prompts
        self.seed = config.training.seed
        self.group_size = config.actor_rollout.n_samples_per_prompt

    def collect(self) -> Collected:
        """Draw prompts, start generation and scoring; return references to the samples.

        Also starts ReMax's greedy responses. Waits for scores only with `filter_groups`.
        """
        if self.algorithm.filter_groups:
            found = self._collect_differing_groups()
        else:
            prompts = self.prompts.next_prompts()
            batch = self._score(
                prompts, self.rollout.generate(prompts, self.seed, Sampling.TRAINING)
            )
            found = Collected(batch.generated.rows(), batch.scored.rows(), [batch])
        return self._add_greedy(found) if self.algorithm.estimator.reads_greedy else found

    def metrics(self, found: Collected) -> dict[str, float]:
        """Return the number of generated batches, and of prompts kept with all scores equal.

        As `rollout/gen_batches` and `rollout/alike_groups`; {} without `filter_groups`.
        """
        if not self.algorithm.filter_groups:
            return {}
        return {
            "rollout/gen_batches": float(len(found.batches)),
            "rollout/alike_groups": float(found.num_alike),
        }

    def _score(self, prompts: Prompts, generated: Pending) -> Batch:
        return Batch(prompts, generated, self.reward.score(generated.rows()))

    def _collect_differing_groups(self) -> Collected:
        """Generate batches until enough prompts have responses with different scores, as in DAPO.

        arXiv:2503.14476, section 3.2. Prompts whose responses all score the same are dropped, but
        fill the batch if `max_num_gen_batches` batches are not enough. Scores are compared after
        shaping; penalties (missing EOS, length, KL) do not count, because any two responses differ
        in them, nor do unscored responses. Prompts beyond the batch are dropped too; kept ones stay
        in draw order. Waits for the scores.
        """
        wanted, size = self.config.training.global_batch_size, self.group_size
        batches: list[Batch] = []
        differing: list[int] = []
        most = self.algorithm.max_num_gen_batches or math.inf
        while len(differing) < wanted and len(batches) < most:
            prompts = self.prompts.next_prompts()
            generated = self.rollout.generate(prompts, self.seed, Sampling.TRAINING)
            batches.append(self._score(prompts, generated))
            offset = (len(batches) - 1) * wanted
            given, keys = torch.tensor(batches[-1].scores()), self.algorithm
            seen = shape_scores(given, keys.reward_scale, keys.reward_clip).tolist()
            scored = [each for report in batches[-1].scored.result() for each in report.is_scored]
            differing += [offset + g for g in groups_that_differ(seen, scored, size)]
        alike = sorted(set(range(len(batches) * wanted)) - set(differing))
        missing = max(0, wanted - len(differing))
        groups = sorted(differing[:wanted] + alike[:missing])
        kept = [group * size + i for group in groups for i in range(size)]
        rollouts = RowsRef.concat([batch.generated.rows() for batch in batches]).take(kept)
        scores = RowsRef.concat([batch.scored.rows() for batch in batches]).take(kept)
        return Collected(rollouts, scores, batches, kept, missing)

    def _add_greedy(self, found: Collected) -> Collected:
        """Start and score a greedy response per kept prompt; return `found` with them added.

        All samples from a prompt share the greedy response.
        """
        size = self.group_size
        prompts = Prompts.concat([batch.prompts for batch in found.batches])
        kept = range(prompts.num_rows) if found.kept is None else found.kept
        firsts = prompts.select(kept[::size])
        firsts = replace(firsts, responses=[[]] * firsts.num_rows)
        batch = self._score(firsts, self.rollout.generate(firsts, self.seed, Sampling.GREEDY))
        rows = [row // size for row in range(len(kept))]
        return replace(
            found,
            greedy=batch.generated.rows().take(rows),
            greedy_scores=batch.scored.rows().take(rows),
            greedy_batch=batch,
        )
