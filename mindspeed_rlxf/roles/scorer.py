"""The scorer role: scores responses as they finish, in the process that generates them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from mindspeed_rlxf.config.enums import RewardKind
from mindspeed_rlxf.config.schema import RewardConfig, RunConfig
from mindspeed_rlxf.data.agent_record import find_record
from mindspeed_rlxf.data.batch import Prompts, RoleOutput, Rollouts, RuleScores
from mindspeed_rlxf.data.decoding import RewardTexts
from mindspeed_rlxf.data.prompt_store import reward_style
from mindspeed_rlxf.data.tokenizer import load_tokenizer
from mindspeed_rlxf.rewards.outcome import Outcome, Sample
from mindspeed_rlxf.rewards.plans import (
    Scoring,
    StreamingRewards,
    join_scoring,
    restore_scoring,
    save_scoring,
    scores_row,
)
from mindspeed_rlxf.rewards.verifiers import find_answers
from mindspeed_rlxf.roles.reports import FailedSample, ScoreReport, failed_by_agent
from mindspeed_rlxf.rollout.rollout_engine import FinishReason, GenerationResult

MAX_TEXT = 2000  # characters of a string of a sample without a score


class ScorerRole:
    """Scores responses by functions and rules, in child processes.

    `start` and `follow` start scoring finished responses, and `score` waits for the results; it
    starts rows that neither has seen.
    """

    def __init__(self, config: RunConfig) -> None:
        self.reward, self.verifiers = config.reward, config.verifiers
        tokenizer = load_tokenizer(config.training.tokenizer_name_or_path)
        self.texts = RewardTexts(tokenizer, config.actor_rollout.stop_strings)
        self.rewards = StreamingRewards(config.reward)
        self.is_leader = True  # whether this rank scores for its replica; set by RolloutRole
        self._followed: list[dict[tuple[int, ...], Scoring]] = []  # one for each call of `follow`
        # Sample id -> response -> its scoring, until `forget`.
        self._started: dict[int, dict[tuple[int, ...], Scoring]] = {}

    def start(self, prompt: Prompts, result: GenerationResult) -> None:
        """Start scoring a training response; its scoring is kept until `forget`.

        Does nothing beside leaders, for rows of a model alone or of an agent that has failed, and
        if it was started before.

        Args:
            prompt: The sample's row.
            result: Its response.
        """
        scorings = self._started.setdefault(prompt.sample_ids[0], {})
        response = tuple(result.tokens)
        if response not in scorings and self._scores(prompt, 0):
            scorings[response] = self._submit_result(prompt, 0, result)

    def save_outcomes(self, sample_id: int, response: Sequence[int]) -> list[Any] | None:
        """Return the outcomes of a scoring that was started (JSON); None if it has not ended."""
        scoring = self._started.get(sample_id, {}).get(tuple(response))
        return None if scoring is None else save_scoring(scoring)

    def restore_outcomes(
        self, sample_id: int, response: Sequence[int], saved: Sequence[Any]
    ) -> None:
        """Keep outcomes of an earlier run, as if `start` had been called, until `forget`."""
        scorings = self._started.setdefault(sample_id, {})
        scorings[tuple(response)] = restore_scoring(saved)

    def forget(self, sample_ids: Sequence[int]) -> None:
        """Forget what `start` has kept of these samples; unknown ids are ignored."""
        for sample_id in sample_ids:
            self._started.pop(sample_id, None)

    def follow(
        self, prompts: Prompts, results: Iterable[GenerationResult]
    ) -> Iterator[GenerationResult]:
        """Yield the results unchanged; on leaders, start scoring each one first.

        `score` reads the last two calls; older ones are forgotten. Rows for a model alone are
        skipped.
        """
        begun: dict[tuple[int, ...], Scoring] = {}
        self._followed = [*self._followed, begun][-2:]
        for result in results:
            if self._scores(prompts, result.place):
                key = prompts.sample_ids[result.place], *result.tokens
                begun[key] = self._submit_result(prompts, result.place, result)
            yield result

    def _scores(self, prompts: Prompts, row: int) -> bool:
        extra_info = prompts.extra_infos[row]
        return self.is_leader and scores_row(self.reward, extra_info) and not has_failed(extra_info)

    def _submit_result(self, prompts: Prompts, row: int, result: GenerationResult) -> Scoring:
        has_ended = result.finish_reason is FinishReason.STOP
        scored = scored_tokens(result.tokens, prompts.extra_infos[row], self.reward)
        text = self.texts.response(scored, has_ended)
        return self._submit(prompts, row, prompts.token_ids[row].tolist(), text)

    def _find_scoring(
        self, sample_id: int, response: Sequence[int], validates: bool
    ) -> Scoring | None:
        """Return what `follow` has started, which is read once, or what `start` has.

        Sample ids of validation, which `follow` has, are also those of training, which `start` has.
        """
        key = sample_id, *response
        for begun in reversed(self._followed):
            if key in begun:
                return begun.pop(key)
        return None if validates else self._started.get(sample_id, {}).get(tuple(response))

    def score(self, rollouts: Rollouts, validates: bool = False) -> RoleOutput:
        """Wait for each row's score; `reward.failed_score` if scoring failed, 0 for a model's rows.

        When validating, every row is scored, and the report has each response's answer. Rows:
        RuleScores. Report: ScoreReport with parts and failures. Both only on leaders.

        Raises:
            ScoringBroken: No sample can be scored.
        """
        if not self.is_leader:
            return RoleOutput()
        prompts, responses = rollouts.prompt_tokens(), rollouts.response_tokens()
        texts = [
            self.texts.response(scored_tokens(tokens, extra_info, self.reward), has_eos)
            for tokens, extra_info, has_eos in zip(
                responses, rollouts.extra_infos, rollouts.has_eos.tolist(), strict=True
            )
        ]
        scorings: list[Scoring] = []
        for row, sample_id in enumerate(rollouts.sample_ids):
            extra_info = rollouts.extra_infos[row]
            is_scored = validates or scores_row(self.reward, extra_info)
            if not is_scored or has_failed(extra_info):
                scorings.append([])
                continue
            scoring = self._find_scoring(sample_id, responses[row], validates)
            if scoring is None:
                scoring = self._submit(rollouts, row, prompts[row], texts[row])
            scorings.append(scoring)
        by_model = self.reward.kind is not RewardKind.RULE and not validates
        outcomes = [
            join_scoring(scoring, by_model and reward_style(extra_info) != "rule")
            for scoring, extra_info in zip(scorings, rollouts.extra_infos, strict=True)
        ]
        scores = [
            self.reward.failed_score if o.result is None else float(o.result.score or 0.0)
            for o in outcomes
        ]
        parts = [dict(o.result.parts) if o.result else {} for o in outcomes]
        failures: list[FailedSample | None] = []
        for row, outcome in enumerate(outcomes):
            if outcome.cause is None:
                record = find_record(rollouts.extra_infos[row])
                failures.append(failed_by_agent(rollouts.sample_ids[row], record))
                continue
            details = ""
            if not any(failures):  # one sample of a batch is enough to find the mistake
                sample = self._sample(rollouts, row, prompts[row], texts[row])
                details = describe_failure(sample, outcome)
            id_, cause = rollouts.sample_ids[row], outcome.cause
            failures.append(
                FailedSample(id_, cause.value, outcome.message, cause.is_outside, details)
            )
        rows = RuleScores(torch.tensor(scores, dtype=torch.float32), parts, failures)
        answers: list[str | None] = []
        if validates:
            answers = find_answers(texts, rollouts.data_sources, self.reward.rules, self.verifiers)
        return RoleOutput(rows, ScoreReport(scores, parts, failures, answers))

    def _submit(
        self, rows: Prompts | Rollouts, row: int, prompt: Sequence[int], response: str
    ) -> Scoring:
        return self.rewards.submit(self._sample(rows, row, prompt, response))

    def _sample(
        self, rows: Prompts | Rollouts, row: int, prompt: Sequence[int], response: str
    ) -> Sample:
        truth, source = rows.ground_truths[row], rows.data_sources[row]
        text = self.texts.prompt(prompt)
        return Sample(text, response, truth, source, rows.extra_infos[row])


def has_failed(extra_info: Mapping[str, Any]) -> bool:
    """Whether the agent of a row's sample has failed, so that nothing scores it."""
    record = find_record(extra_info)
    return record is not None and record.failure is not None


def scored_tokens(
    tokens: Sequence[int], extra_info: Mapping[str, Any], reward: RewardConfig
) -> Sequence[int]:
    """Return the tokens of a response that rules and functions read (`reward.agent_text`)."""
    record = find_record(extra_info)
    if record is None or not record.turns or reward.agent_text == "all":
        return tokens
    first, end = record.turns[-1]
    return tokens[first:end]


def describe_failure(sample: Sample, outcome: Outcome) -> str:
    """Return lines with the sample's strings, shortened, and what is known of its failure."""
    lines = [
        f"prompt: {sample.prompt!r:.{MAX_TEXT}}",
        f"response: {sample.response!r:.{MAX_TEXT}}",
        f"ground truth: {sample.ground_truth!r:.{MAX_TEXT}}",
        f"data source: {sample.data_source!r:.{MAX_TEXT}}",
    ]
    if outcome.details:
        lines.append(outcome.details)
    return "\n".join(lines)
