"""The reward role: scores responses with a reward model, a classifier or rules."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mindspeed_rlxf.cluster.group import RoleFuture, RoleGroup, Sharded
from mindspeed_rlxf.cluster.interface import Pool
from mindspeed_rlxf.cluster.refs import RowsRef
from mindspeed_rlxf.config.enums import RewardKind, Role
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.agent_record import find_record
from mindspeed_rlxf.data.batch import RoleOutput, Rollouts, RuleScores, Scores
from mindspeed_rlxf.data.decoding import RewardTexts
from mindspeed_rlxf.data.prompt_store import reward_style
from mindspeed_rlxf.data.tokenizer import load_tokenizer
from mindspeed_rlxf.rewards.classifier import Classifier
from mindspeed_rlxf.rewards.manager import RewardManager
from mindspeed_rlxf.rewards.outcome import Cause
from mindspeed_rlxf.rewards.verifiers import find_answers
from mindspeed_rlxf.roles.engines import EngineFactory, room_on_device, train_engine
from mindspeed_rlxf.roles.own_roles import role_factory
from mindspeed_rlxf.roles.reports import FailedSample, ScoreReport, failed_by_agent
from mindspeed_rlxf.roles.scorer import ScorerRole, scored_tokens

FAULTS_OF_FUNCTIONS = (Cause.EXCEPTION.value, Cause.WRONG_RESULT.value, Cause.NOT_FINITE.value)


MAX_NAMED = 8  # causes, and samples of each, in a message


class RewardsFailed(RuntimeError):
    """More samples in a batch could not be scored than `reward.max_failed` allows.

    Attributes:
        failed_sample: Details of the first one (`FailedSample.details`); empty if unknown.
        meets_most: Most samples of the batch met an error of the reward function itself, which
            another attempt would meet again.
    """

    def __init__(self, message: str, failed_sample: str = "", meets_most: bool = False) -> None:
        super().__init__(message)
        self.failed_sample = failed_sample
        self.meets_most = meets_most


class RewardGroup:
    """The ranks that score responses.

    `scorers`, if any, score by functions or rules in processes, during generation. `group` are the
    model's or rules' ranks; without a model the scorers, if any. With `streams`, training scores
    come from the scorers, alone or together with the model.
    """

    def __init__(self, config: RunConfig, pool: Pool, beside: RoleGroup | None = None) -> None:
        """Choose the ranks; scorers, if any, run beside the generating ranks `beside`."""
        self.run, self.scorers = config, None
        by_model = config.reward.kind is not RewardKind.RULE
        if beside is not None:
            self.scorers = RoleGroup(Role.SCORER, beside.layout, beside.pool)
        by_rules = (
            not by_model or bool(config.reward.scoring_functions) or config.reward.chooses_by_label
        )
        self.streams = beside is not None and by_rules
        self.group = (
            self.scorers
            if self.scorers and not by_model
            else RoleGroup(Role.REWARD, config.layout(Role.REWARD), pool)
        )

    def build(self) -> list[RoleFuture]:
        """Submit the construction on the reward's own ranks, if there are any."""
        return (
            []
            if self.group is self.scorers
            else [self.group.build(role_factory(Role.REWARD, RewardRole), self.run)]
        )

    def score(self, rollouts: RowsRef, is_batch: bool = True) -> RoleFuture:
        """Submit the responses for scoring. Rows: Scores. Reports: ScoreReport per replica.

        With functions beside a model, the scorers go first and the model adds its scores. After
        `RoleFuture.in_order` the reports' samples are in the order of `rollouts`. Of a whole batch
        (`is_batch`) `result` raises RewardsFailed if too many samples have no score; the caller
        checks the parts of one (`check_failures`).
        """
        if not self.streams:
            return self._call_model(RewardRole.score, rollouts)
        scored = self._score_by_functions(rollouts)
        if self.group is self.scorers:
            return scored.require(self._check) if is_batch else scored
        both = self._call_model(RewardRole.score_beside_rules, rollouts, scored.rows())
        both.after(scored)
        return both.require(self._check) if is_batch else both

    def _call_model(self, method: Callable[..., Any], *rows: RowsRef) -> RoleFuture:
        """Call the reward's own ranks; some rows are scored twice if the ranks do not divide them.

        With `algorithm.filter_groups` any number of groups is scored at once.
        """
        count = rows[0].num_rows
        missing = -count % self.group.layout.dp
        if not missing:
            return self.group.call(method, *rows)
        padded = [*range(count), *(row % count for row in range(missing))]
        pending = self.group.call(method, *(each.take(padded) for each in rows))
        return pending.reorder(range(count))

    def score_by_rule(self, rollouts: RowsRef) -> RoleFuture:
        """Submit scoring by rules or functions alone, even if the reward is a model.

        Reports include the answers found in the responses.
        """
        if self.scorers is not None:
            return self._score_by_functions(rollouts, True).require(self._check)
        return self.group.call(RewardRole.score_by_rule, rollouts, True)

    def _score_by_functions(self, rollouts: RowsRef, validates: bool = False) -> RoleFuture:
        assert self.scorers is not None
        is_whole = (
            len(rollouts.pieces) == self.scorers.layout.dp
            and sum(piece.num_rows for piece in rollouts.pieces) == rollouts.num_rows
            and len(set(rollouts.selection or ())) in (0, rollouts.num_rows)
        )
        if not is_whole:  # rows of a model's ranks, or some of several generations
            return self.scorers.call(ScorerRole.score, rollouts, validates)
        # Each process scores the responses that it generated, for it has begun to.
        pieces = Sharded([RowsRef((piece,)) for piece in rollouts.pieces])
        scored = self.scorers.call(ScorerRole.score, pieces, validates)
        if rollouts.selection is not None:
            scored.reorder(rollouts.selection)
        return scored

    def _check(self, reports: list[ScoreReport]) -> None:
        failures = [failure for report in reports for failure in report.failures]
        check_failures(failures, self.run.reward.max_failed)


def check_failures(failures: list[FailedSample | None], max_failed: int | None) -> None:
    """Raise RewardsFailed, naming each cause with its samples, if more than `max_failed` failed.

    `failures` has one entry per sample, None if scored. `max_failed` None = a tenth, rounded down,
    at least one.
    """
    failed = [failure for failure in failures if failure is not None]
    allowed = max(1, len(failures) // 10) if max_failed is None else max_failed
    if len(failed) <= allowed:
        return
    ids_by_cause: dict[str, list[str]] = {}
    for failure in failed:
        cause = f"{failure.cause} ({failure.message})"
        ids_by_cause.setdefault(cause, []).append(str(failure.sample_id))
    named = []
    for cause, ids in [*ids_by_cause.items()][:MAX_NAMED]:
        listed = ", ".join(ids[:MAX_NAMED])
        if len(ids) > MAX_NAMED:
            listed += f" and {len(ids) - MAX_NAMED} more"
        named.append(f"{'sample' if len(ids) == 1 else 'samples'} {listed}: {cause}")
    if len(ids_by_cause) > MAX_NAMED:
        named.append(f"and {len(ids_by_cause) - MAX_NAMED} more causes")
    faults = [failure for failure in failed if failure.cause in FAULTS_OF_FUNCTIONS]
    raise RewardsFailed(
        f"{len(failed)} of {len(failures)} samples of a batch could not be scored, at most "
        f"reward.max_failed={allowed} may; correct the reward, or raise it. " + "; ".join(named),
        failed_sample=next((f.details for f in failed if f.details), ""),
        meets_most=len(faults) > len(failures) / 2,
    )


class RewardRole:
    """Scores responses by rules (no device), a Megatron reward model, or a classifier."""

    def __init__(self, config: RunConfig, build_engine: EngineFactory = train_engine) -> None:
        reward = config.reward
        self.config, self.verifiers = reward, config.verifiers
        self.runs_agents = config.rollout.runs_agents
        self.tokenizer = load_tokenizer(config.training.tokenizer_name_or_path)
        self.texts = RewardTexts(self.tokenizer, config.actor_rollout.stop_strings)
        self.rules = RewardManager(dict(reward.rules), config.verifiers)
        is_model = reward.kind is RewardKind.MODEL
        self.engine = build_engine(config, Role.REWARD) if is_model else None
        given = str(reward.load), self.tokenizer, reward.micro_batch_size, reward.bf16
        is_classifier = reward.kind is RewardKind.HUGGING_FACE
        self.classifier = Classifier(*given) if is_classifier else None

    def score(self, rollouts: Rollouts) -> RoleOutput:
        """Score responses by `reward.kind`.

        Rows: Scores. Report: ScoreReport. With a reward model only on replica leaders.
        """
        if self.classifier is not None:
            with room_on_device():
                found = self.classifier.score_rollouts(rollouts)
            return self._make_output(rollouts, found)
        if self.engine is None:
            return self.score_by_rule(rollouts)
        scores = self.engine.scores(rollouts)
        if scores is None:  # this rank is no leader
            return RoleOutput()
        return self._make_output(rollouts, scores.scores.tolist())

    def _make_output(
        self,
        rollouts: Rollouts,
        scores: list[float],
        parts: Sequence[dict[str, float | str]] = (),
        answers: Sequence[str | None] = (),
    ) -> RoleOutput:
        """Return rows and report of scores; with agents both name those that have failed."""
        tensor = torch.tensor(scores, dtype=torch.float32)
        if not self.runs_agents:
            report = ScoreReport(scores, list(parts), answers=list(answers))
            return RoleOutput(Scores(tensor), report)
        failures = [
            failed_by_agent(sample_id, find_record(extra_info))
            for sample_id, extra_info in zip(rollouts.sample_ids, rollouts.extra_infos, strict=True)
        ]
        rows = RuleScores(tensor, list(parts) or [{} for _ in scores], failures)
        return RoleOutput(rows, ScoreReport(scores, list(parts), failures, list(answers)))

    def _decode(self, token_ids: list[list[int]]) -> list[str]:
        """Return texts without EOS and padding at their ends, for subclasses."""
        texts = RewardTexts(self.tokenizer)
        return [texts.response(ids, has_ended=False) for ids in token_ids]

    def score_beside_rules(self, rollouts: Rollouts, rules: RuleScores) -> RoleOutput:
        """Score by the model, and add the functions' scores `rules` for the same samples.

        A row's `reward_model.style` leaves one out; without it the score is model_weight * the
        model's + the functions'. A sample whose functions failed keeps `reward.failed_score`,
        without the model's. Rows: RuleScores. Report: ScoreReport, with the model's score as the
        part `model`. Only on leaders.
        """
        output = self.score(rollouts)
        if output.rows is None:  # this rank is no leader
            return output
        weight = self.config.model_weight
        scores, parts = [], []
        rows = zip(
            output.report.scores,
            rules.scores.tolist(),
            rules.parts,
            rules.failures,
            rollouts.extra_infos,
            strict=True,
        )
        for of_model, of_rules, named, failure, extra_info in rows:
            by_rule = reward_style(extra_info) == "rule"
            scores.append(of_rules if failure or by_rule else weight * of_model + of_rules)
            parts.append(named if by_rule else {**named, "model": of_model})
        failures = rules.failures
        both = RuleScores(torch.tensor(scores, dtype=torch.float32), parts, failures)
        return RoleOutput(both, ScoreReport(scores, parts, failures))

    def score_by_rule(self, rollouts: Rollouts, validates: bool = False) -> RoleOutput:
        """Score responses by verifiers, or by each data source's rule.

        Rows: Scores. Report: ScoreReport with parts, and when validating the answers found.
        """
        texts = [
            self.texts.response(scored_tokens(tokens, extra_info, self.config), has_eos)
            for tokens, extra_info, has_eos in zip(
                rollouts.response_tokens(),
                rollouts.extra_infos,
                rollouts.has_eos.tolist(),
                strict=True,
            )
        ]
        results = self.rules.score(
            texts, rollouts.ground_truths, rollouts.data_sources, rollouts.extra_infos
        )
        scores = [result.score or 0.0 for result in results]
        found: list[str | None] = []
        if validates:
            found = find_answers(texts, rollouts.data_sources, self.config.rules, self.verifiers)
        parts = [dict(result.parts) for result in results]
        return self._make_output(rollouts, scores, parts, found)
