"""Generate responses to the validation prompts, score them by rule or model, and log them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mindspeed_rlxf.config.enums import RewardKind
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.batch import Prompts
from mindspeed_rlxf.data.prompts import Prompt
from mindspeed_rlxf.reporting.phases import phase
from mindspeed_rlxf.roles.groups import RoleGroups
from mindspeed_rlxf.roles.reports import ScoreReport
from mindspeed_rlxf.roles.rollout import Sampling
from mindspeed_rlxf.run.recorder import Recorder
from mindspeed_rlxf.trainer.prompt_source import as_rows
from mindspeed_rlxf.trainer.validation_metrics import Scored, measure


class Validator:
    """Generates and scores responses to all validation prompts.

    Sample ids are the same in each validation: response i to prompt p, both counted from 0, is
    sample p * n_samples + i. With the seed they determine sampled tokens, so that two validations
    differ only by their weights.
    """

    def __init__(
        self, config: RunConfig, roles: RoleGroups, prompts: Sequence[Prompt], recorder: Recorder
    ) -> None:
        self.config, self.roles, self.recorder = config.validation, roles, recorder
        self.seed = validation_seed(config.training.seed)
        size = self.config.n_samples
        self.prompts = as_rows([prompt for prompt in prompts for _ in range(size)])
        self._padded = self._pad_prompts()

    def _pad_prompts(self) -> Prompts:
        """Return the prompts with the first ones repeated at the end; without prompts, none.

        Their number can then be divided by the replicas of the rollout and of the reward.
        """
        count = self.prompts.num_rows
        if not count:
            return self.prompts
        parts = math.lcm(self.roles.rollout.group.layout.dp, self.roles.reward.group.layout.dp)
        return self.prompts.select([i % count for i in range(count + -count % parts)])

    def validate(self, iteration: int, version: int, own_line: bool = False) -> dict[str, float]:
        """Generate and score responses to the validation prompts; return and print the metrics.

        {} without validation prompts, and nothing is printed. The rollout ranks get the actor's
        weights first. Samples are written to the run directory. Names are `val/<data
        source>/<metric>` (`validation_metrics`) and `timing/val`, seconds of generation and
        scoring.
        Raises RewardsFailed where functions score and too many samples failed.
        iteration: number of finished iterations
        version:   number of updates in the actor's weights
        own_line:  also write the metrics to metrics.jsonl, as a separate line, and to the trackers;
                   False = the caller writes them
        """
        if not self.prompts.num_rows:
            return {}
        with phase(f"validating, {self.prompts.num_rows} responses", prints=False):
            self.roles.rollout.update_weights(self.roles.actor, version)
            generated = self.roles.rollout.generate(self._padded, self.seed, Sampling.VALIDATION)
            rollouts = generated.rows()
            by_rule = self.config.reward is RewardKind.RULE
            reward = self.roles.reward
            scored = reward.score_by_rule(rollouts) if by_rule else reward.score(rollouts)
            lengths = [n for report in generated.result() for n in report.response_lengths]
            found = self._join_scored(lengths, scored.result())
        size = self.config.n_samples
        groups = [found[i : i + size] for i in range(0, len(found), size)]
        metrics = measure(groups, self.prompts.data_sources[::size], self.config)
        metrics["timing/val"] = generated.seconds + scored.seconds
        self.recorder.write_validation(iteration, metrics, own_line)
        about = [
            {"prompt_id": row // size, "answer": each.answer, "ground_truth": truth}
            for row, (each, truth) in enumerate(zip(found, self.prompts.ground_truths, strict=True))
        ]
        sources = self.prompts.data_sources
        self.recorder.write_samples(
            iteration, self.roles.actor, rollouts, scored.result(), sources, about
        )
        return metrics

    def _join_scored(self, lengths: Sequence[int], reports: Sequence[ScoreReport]) -> list[Scored]:
        """Return the scored responses in the order of `prompts`, without those of the padding.

        lengths: tokens of each response
        Where the reports have no parts or no answers, they are {} or None.
        """
        scores = [score for report in reports for score in report.scores]
        parts = [part for report in reports for part in report.parts] or [{}] * len(scores)
        answers = [a for report in reports for a in report.answers] or [None] * len(scores)
        scored = [each for report in reports for each in report.is_scored]
        rows = zip(scores, lengths, parts, answers, scored, strict=True)
        return [Scored(*row) for row, _ in zip(rows, self.prompts.sample_ids, strict=False)]


def validation_seed(seed: int) -> int:
    """Return the seed of validation, derived from `seed`.

    It differs from that of training, because sample ids of validation are also those of training.
    """
    return int(np.random.SeedSequence([seed, 1]).generate_state(1)[0])
