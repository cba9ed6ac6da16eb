"""The section `validation`: when and how to validate, and which metric ranks checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from mindspeed_rlxf.config.enums import RewardKind
from mindspeed_rlxf.config.errors import Problem, ref
from mindspeed_rlxf.config.fields import Section, Word, key


class ValidationConfig(Section):
    """Times at which the validation prompts are answered and scored, and how."""

    interval: int = key(
        0,
        "iterations between validations; 0 = never during training",
        "free",
        ge=0,
        used_if="!only",
    )
    before: bool = key(True, "validate before the first iteration", "free", used_if="!only")
    after: bool = key(True, "validate after the last iteration", "free", used_if="!only")
    only: bool = key(
        False,
        "validate the run's newest checkpoint, or the weights of `load` if there is none, and end",
        "free",
    )
    max_samples: int | None = key(
        None, "prompts used; null = all", "free", ge=1, used_if="has_validation_prompts; happens"
    )
    n_samples: int = key(
        1, "responses per prompt", "free", ge=1, used_if="has_validation_prompts; happens"
    )
    do_sample: bool = key(
        False, "sample; false = greedy", "free", used_if="has_validation_prompts; happens"
    )
    temperature: float = key(
        1.0,
        "divides the logits; used only when sampling",
        "free",
        gt=0,
        used_if="has_validation_prompts; happens; do_sample",
    )
    top_k: int = key(
        0,
        "sample among this many; 0 = all",
        "free",
        ge=0,
        used_if="has_validation_prompts; happens; do_sample",
    )
    top_p: float = key(
        1.0,
        "sample among tokens of this total probability",
        "free",
        gt=0,
        le=1,
        used_if="has_validation_prompts; happens; do_sample",
    )
    reward: Annotated[RewardKind, Word] = key(
        RewardKind.RULE,
        "scores the responses: rule, or model (that of reward.kind=model)",
        "free",
        used_if="has_validation_prompts; happens",
    )
    pass_score: float | None = key(
        None,
        "lowest score of a right response; null = accuracy (without one: score) above 0",
        "free",
        used_if="has_validation_prompts; happens",
    )
    best_metric: str = key(
        "score",
        "the best checkpoint has the highest: score, mean@N, maj@N, best@K or pass@K, averaged "
        "over data sources, or one metric `val/SOURCE/...`",
        "free",
        used_if="has_validation_prompts; happens; !only",
    )

    @property
    def happens(self) -> bool:
        return bool(self.interval or self.before or self.after or self.only)

    @property
    def sizes(self) -> list[int]:
        """K of best@K and pass@K, ascending: 1, 2, 4 ... below `n_samples`, then `n_samples`."""
        powers = [2**i for i in range(self.n_samples.bit_length()) if 2**i < self.n_samples]
        return [*powers, self.n_samples]

    @property
    def metrics(self) -> list[str]:
        """Names that `best_metric` may have: metrics that every data source gets, without prefix.

        Always score and mean@N, N = `n_samples`; best@K for each K > 1 of `sizes`; with kind rule
        and N > 1 maj@N; with kind rule or a `pass_score` pass@K for each K of `sizes`.
        """
        n = self.n_samples
        by_rule = self.reward is RewardKind.RULE
        found = ["score", f"mean@{n}"]
        if n > 1:
            found += [f"best@{k}" for k in self.sizes if k > 1]
            found += [f"maj@{n}"] if by_rule else []
        if by_rule or self.pass_score is not None:
            found += [f"pass@{k}" for k in self.sizes]
        return found

    def broken_rules(self) -> Iterator[Problem]:
        if self.n_samples > 1 and not self.do_sample:
            yield Problem(
                "n_samples",
                f"must be 1 with {ref('do_sample')}=false, where every sample would be the same",
                self.n_samples,
                f"use {ref('do_sample')}=true",
            )
        source, _, name = self.best_metric.rpartition("/")
        if name not in self.metrics or (source and not source.startswith("val/")):
            known = ", ".join(self.metrics)
            yield Problem(
                "best_metric",
                f"must be one of {known}, which {ref('n_samples')}={self.n_samples} gives, or that "
                "of one data source, as val/SOURCE/score",
                self.best_metric,
                "use score",
            )
