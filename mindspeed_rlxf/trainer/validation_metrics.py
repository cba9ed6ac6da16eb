"""Metrics of a validation over several responses to each prompt: mean@N, best@K, maj@N, pass@K.

All responses to a prompt are used: best@K and pass@K are exact expectations over K of the N
responses, drawn without replacement, so no random numbers are involved.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mindspeed_rlxf.config.schema import ValidationConfig

ACCURACY = ("accuracy", "acc", "base_acc")
"""Names of parts of a rule's score; a response is right if the first one present is above 0."""


@dataclass(frozen=True)
class Scored:
    """One scored response.

    length:    in tokens
    parts:     named parts of the score
    answer:    extracted answer; None if there is none, or answers are not extracted
    is_scored: False = it could not be scored, for a cause that is not the response's
    """

    score: float
    length: int
    parts: Mapping[str, float] = field(default_factory=dict)
    answer: str | None = None
    is_scored: bool = True

    def is_right(self, pass_score: float | None) -> bool:
        """Return whether the response counts as right: score >= pass_score.

        pass_score: None = whether the accuracy part, or without one the score, is above 0
        False where the compared value is NaN.
        """
        if pass_score is not None:
            return self.score >= pass_score
        named = [self.parts[name] for name in ACCURACY if name in self.parts]
        return (named or [self.score])[0] > 0


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Return 1 - C(n - c, k) / C(n, k): the chance that k of n responses include a right one.

    n = num_samples, c = num_right, k: 1 to n. Unbiased estimator of arXiv:2107.03374, equation 1.
    """
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def best_at_k(scores: Sequence[float], k: int) -> float:
    """Return the expected maximum of k of the n scores, drawn without replacement; k: 1 to n.

    The score of rank i (from 0, ascending) is the largest of C(i, k - 1) of the C(n, k) choices.
    NaN where a score is NaN.
    """
    if any(math.isnan(score) for score in scores):
        return math.nan
    weights = [math.comb(i, k - 1) / math.comb(len(scores), k) for i in range(len(scores))]
    return sum(w * score for w, score in zip(weights, sorted(scores), strict=True) if w)


def majority_score(answers: Sequence[str | None], scores: Sequence[float]) -> float:
    """Return the mean score of the responses with the most frequent answer.

    The vote of self-consistency (arXiv:2203.11171, section 2). Responses with answer None do not
    vote; if all are None, return the mean of all scores. For several most frequent answers, return
    the mean of their mean scores.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return sum(scores) / len(scores)
    most = max(votes.values())
    winners = [answer for answer, count in votes.items() if count == most]
    by_answer: dict[str | None, list[float]] = defaultdict(list)
    for answer, score in zip(answers, scores, strict=True):
        by_answer[answer].append(score)
    return sum(sum(by_answer[winner]) / most for winner in winners) / len(winners)


def measure(
    groups: Sequence[Sequence[Scored]], data_sources: Sequence[str], config: ValidationConfig
) -> dict[str, float]:
    """Return metrics `val/<data source>/<name>`.

    groups:       the responses to each prompt
    data_sources: of each prompt
    `score`, `response_length` and the parts are means over responses that have them. The other
    names (mean@N, best@K, pass@K, maj@N), if in `ValidationConfig.metrics`, are means over prompts.
    Responses that could not be scored are left out, and so is a prompt with less than K others.
    """
    values: dict[str, list[float]] = defaultdict(list)
    for group, source in zip(groups, data_sources, strict=True):
        scored = [each for each in group if each.is_scored]
        for each in scored:
            named = {"score": each.score, "response_length": float(each.length), **each.parts}
            for name, value in named.items():
                values[f"val/{source}/{name}"].append(value)
        for name, value in _measure_prompt(scored, len(group), config).items():
            values[f"val/{source}/{name}"].append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}


def _measure_prompt(group: Sequence[Scored], n: int, config: ValidationConfig) -> dict[str, float]:
    """Return mean@N, best@K, pass@K and maj@N of one prompt, those in `config.metrics`.

    group: its scored responses, N unless some could not be scored; {} for none
    """
    if not group:
        return {}
    scores, sizes = [each.score for each in group], [k for k in config.sizes if k <= len(group)]
    num_right = sum(each.is_right(config.pass_score) for each in group)
    found = {f"mean@{n}": sum(scores) / len(group)}
    found |= {f"best@{k}": best_at_k(scores, k) for k in sizes}
    found |= {f"pass@{k}": pass_at_k(len(group), num_right, k) for k in sizes}
    found[f"maj@{n}"] = majority_score([each.answer for each in group], scores)
    return {name: value for name, value in found.items() if name in config.metrics}
