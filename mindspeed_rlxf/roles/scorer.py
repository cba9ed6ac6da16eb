"""The scorer role: it scores responses as they finish, in the process that generates them."""

from collections.abc import Iterable, Iterator, Sequence

import torch

from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.batch import Prompts, RoleOutput, Rollouts, RuleScores
from mindspeed_rlxf.data.tokenizer import load_tokenizer
from mindspeed_rlxf.rewards.outcome import Outcome, Sample
from mindspeed_rlxf.rewards.plans import Scoring, StreamingRewards, scores_row
from mindspeed_rlxf.rewards.verifiers import AnswerFinder
from mindspeed_rlxf.roles.reports import FailedSample, ScoreReport
from mindspeed_rlxf.rollout.rollout_engine import GenerationResult

KEPT_GENERATIONS = 2  # latest calls of `follow` whose scores can still be read


class ScorerRole:
    """Scores responses by functions and rules, in child processes.

    `follow` starts to score each response when it is finished, and `score` waits for the result.
    Rows that `follow` has not seen are scored in `score`.
    """

    def __init__(self, config: RunConfig) -> None:
        self.reward = config.reward
        self.tokenizer = load_tokenizer(config.training.tokenizer_name_or_path)
        self.rewards = StreamingRewards(config.reward)
        self.answers = AnswerFinder(dict(config.reward.rules), config.verifiers)
        self.is_leader = True  # whether this rank scores for its replica; set by RolloutRole
        self._started: list[dict[tuple[int, ...], Scoring]] = []  # one for each call of `follow`

    def follow(
        self, prompts: Prompts, results: Iterable[GenerationResult]
    ) -> Iterator[GenerationResult]:
        """Yield the results unchanged; start to score each one first, on a leader rank.

        `score` takes the scorings of the last KEPT_GENERATIONS calls; older ones are forgotten.
        Does not score rows that a model alone scores.
        """
        begun: dict[tuple[int, ...], Scoring] = {}
        self._started = [*self._started, begun][-KEPT_GENERATIONS:]
        for result in results:
            place = result.place
            if not (self.is_leader and scores_row(self.reward, prompts.extra_infos[place])):
                yield result
                continue
            sample = self._sample(
                prompts.token_ids[place].tolist(),
                result.tokens,
                prompts.ground_truths[place],
                prompts.data_sources[place],
                prompts.extra_infos[place],
            )
            begun[_key(prompts.sample_ids[place], result.tokens)] = self.rewards.submit(sample)
            yield result

    def score(self, rollouts: Rollouts, validates: bool = False) -> RoleOutput:
        """Wait for the score of each row; `reward.failed_score` where scoring failed.

        Rows that a model alone scores get 0.

        Rows: RuleScores. Report: ScoreReport with parts and failures. Both only on a leader rank.
        validates: score every row, and report the answer extracted from each response
        Errors: ScoringBroken where the scoring processes cannot score any sample.
        """
        if not self.is_leader:
            return RoleOutput()
        prompts, responses = rollouts.prompt_tokens(), rollouts.response_tokens()
        scorings = [
            self._take_scoring(rollouts, row, prompts[row], responses[row])
            if validates or scores_row(self.reward, rollouts.extra_infos[row])
            else Scoring(None, [])
            for row in range(rollouts.num_rows)
        ]
        outcomes = [scoring.outcome() for scoring in scorings]
        failed_score = self.reward.failed_score
        scores = [o.result.score if o.result else failed_score for o in outcomes]
        parts = [dict(o.result.parts) if o.result else {} for o in outcomes]
        failures = _list_failures(rollouts.sample_ids, outcomes)
        rows = RuleScores(torch.tensor(scores, dtype=torch.float32), parts, failures)
        answers = self._find_answers(rollouts) if validates else []
        return RoleOutput(rows, ScoreReport(scores, parts, failures, answers))

    def _find_answers(self, rollouts: Rollouts) -> list[str | None]:
        texts = self.tokenizer.batch_decode(rollouts.response_tokens(), skip_special_tokens=True)
        return self.answers.find(texts, rollouts.data_sources)

    def _take_scoring(
        self, rollouts: Rollouts, row: int, prompt: list[int], response: list[int]
    ) -> Scoring:
        """Return the running scoring of a row that `follow` started, else start one.

        Found by sample id and response, in the latest generation that has it. It is returned once:
        a second call for the same row takes an earlier generation's or starts another.
        """
        key = _key(rollouts.sample_ids[row], response)
        for begun in reversed(self._started):
            if key in begun:
                return begun.pop(key)
        return self.rewards.submit(
            self._sample(
                prompt,
                response,
                rollouts.ground_truths[row],
                rollouts.data_sources[row],
                rollouts.extra_infos[row],
            )
        )

    def _sample(self, prompt: Sequence[int], response: Sequence[int], *labels: object) -> Sample:
        prompt_text, text = self.tokenizer.batch_decode(
            [list(prompt), list(response)], skip_special_tokens=True
        )
        return Sample(prompt_text, text, *labels)  # type: ignore[arg-type]


def _key(sample_id: int, response: Sequence[int]) -> tuple[int, ...]:
    return (sample_id, *response)


def _list_failures(
    sample_ids: Sequence[int], outcomes: Sequence[Outcome]
) -> list[FailedSample | None]:
    """Return one entry per sample: its failure, or None where it was scored."""
    return [
        FailedSample(sample_id, o.cause.value, o.message, o.cause.is_outside) if o.cause else None
        for sample_id, o in zip(sample_ids, outcomes, strict=True)
    ]
