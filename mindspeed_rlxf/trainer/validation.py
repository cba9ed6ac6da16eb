"""Greedy responses to the validation prompts, scored by rule where there is one."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from mindspeed_rlxf.cluster.role_groups import RoleGroups
from mindspeed_rlxf.data.batch import Prompts
from mindspeed_rlxf.roles.reports import ScoreReport
from mindspeed_rlxf.run.recorder import Recorder


class Validator:
    """Answer and score all validation prompts; do nothing in a run without them."""

    def __init__(
        self, roles: RoleGroups, prompts: Prompts, by_rule: bool, seed: int, recorder: Recorder
    ) -> None:
        """by_rule: score by the rules of the data sources; else by the configured reward."""
        self.roles, self.prompts, self.by_rule = roles, prompts, by_rule
        self.seed, self.recorder = seed, recorder
        self._filled = self._fill()

    def _fill(self) -> Prompts:
        """Repeat the first prompts at the end, so that all replicas get equal parts."""
        count = self.prompts.num_rows
        if not count:
            return self.prompts
        parts = math.lcm(self.roles.rollout.group.layout.dp, self.roles.reward.group.layout.dp)
        return self.prompts.select([i % count for i in range(count + -count % parts)])

    def validate(self, iteration: int) -> dict[str, float]:
        """Generate and score the validation prompts; return means by data source, and `timing/val`.

        Names are `val/<data source>/{score,response_length,<part>}`. Writes samples and metrics.

        iteration: the last one whose updates are in the actor's weights
        """
        if not self.prompts.num_rows:
            return {}
        self.roles.rollout.update_weights(self.roles.actor, iteration)
        generated = self.roles.rollout.generate(self._filled, self.seed, greedy=True)
        rollouts = generated.rows()
        score = self.roles.reward.score_by_rule if self.by_rule else self.roles.reward.score
        scored = score(rollouts)
        lengths = [n for report in generated.result() for n in report.response_lengths]
        metrics = _means(self.prompts.data_sources, lengths, scored.result())
        metrics["timing/val"] = generated.seconds + scored.seconds
        self.recorder.write_validation(iteration, metrics)
        self.recorder.write_samples(
            iteration, self.roles.actor, rollouts, scored.result(), self.prompts.ground_truths
        )
        return metrics


def _means(
    data_sources: Sequence[str], lengths: Sequence[int], reports: Sequence[ScoreReport]
) -> dict[str, float]:
    """Average scores, their parts and lengths by data source.

    Repeated prompts at the end drop out.
    """
    values: dict[str, list[float]] = defaultdict(list)
    scores = [score for report in reports for score in report.scores]
    parts = [part for report in reports for part in report.parts] or [{}] * len(scores)
    rows = zip(data_sources, lengths, scores, parts, strict=False)  # drops the repeated prompts
    for source, length, score, part in rows:
        for name, value in {"score": score, "response_length": length, **part}.items():
            values[f"val/{source}/{name}"].append(value)
    return {name: sum(v) / len(v) for name, v in values.items()}
