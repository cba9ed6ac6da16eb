"""Score responses by the rule of their data source, or by verifiers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from mindspeed_rlxf.config.enums import Verifier
from mindspeed_rlxf.config.errors import Problem, UserError
from mindspeed_rlxf.data.prompts import Prompt
from mindspeed_rlxf.rewards import programs  # noqa: F401  registers its rules
from mindspeed_rlxf.rewards.rules import (
    ACCEPTS,
    BUILTIN_RULES,
    RULES,
    RULES_WITHOUT_TRUTH,
    SLOW_RULES,
    RewardResult,
)
from mindspeed_rlxf.rewards.verifiers import NEED_TRUTH, verify

_WITHOUT_TRUTH = [RULES[name] for name in RULES_WITHOUT_TRUTH]
_SLOW = [RULES[name] for name in SLOW_RULES]


class RewardManager:
    """Scores responses in this process, by verifiers if there are some, else by rules.

    rules: data source -> name of a rule; overrides the built-in table
    """

    def __init__(
        self, rules: Mapping[str, str], verifiers: Sequence[tuple[Verifier, float]] = ()
    ) -> None:
        unknown = {source: name for source, name in rules.items() if name not in RULES}
        if unknown:
            rule, remedy = "must name a rule", f"use one of {', '.join(sorted(RULES))}"
            raise UserError(
                [
                    Problem(f"reward.rules.{source}", rule, repr(name), remedy)
                    for source, name in unknown.items()
                ]
            )
        self._rules = BUILTIN_RULES | {source: RULES[name] for source, name in rules.items()}
        self._verifiers = list(verifiers)

    def score(
        self,
        response_texts: Sequence[str],
        ground_truths: Sequence[str],
        data_sources: Sequence[str],
    ) -> list[RewardResult]:
        """Score each response; raise UserError for a data source without a rule."""
        if self._verifiers:
            pairs = zip(response_texts, ground_truths, strict=True)
            return [verify(self._verifiers, response, truth) for response, truth in pairs]
        unknown = Counter(source for source in data_sources if source not in self._rules)
        if unknown:
            raise UserError(self._unknown_sources(unknown))
        rows = zip(response_texts, ground_truths, data_sources, strict=True)
        return [self._rules[source](response, truth) for response, truth, source in rows]

    def check(self, prompts: Iterable[Prompt]) -> list[Problem]:
        """Return the problems of prompts that cannot be scored, one per data source.

        A ground truth must be accepted by the rule's function in ACCEPTS, else score above 0 as a
        response to itself. With verifiers it must be there, if one of them reads it.
        """
        if self._verifiers:
            return self._without_truth(prompts)
        unknown: Counter[str] = Counter()
        unscorable: Counter[str] = Counter()
        firsts: dict[str, tuple[Prompt, str]] = {}  # of the unscorable ones
        for prompt in prompts:  # once, since they may be read from a disk
            if prompt.data_source not in self._rules:
                unknown[prompt.data_source] += 1
            elif (reason := self._refuse(prompt)) is not None:
                unscorable[prompt.data_source] += 1
                firsts.setdefault(prompt.data_source, (prompt, reason))
        problems = self._unknown_sources(unknown)
        for source, count in unscorable.items():
            first, reason = firsts[source]
            problems.append(
                Problem(
                    f"every row of data source {source!r}",
                    f"must have a ground truth that its rule {self._rules[source].__name__} "
                    f"accepts as an answer; {count} have not, the first is prompt {first.index} "
                    f"({first.text!r:.40}) with {first.ground_truth!r:.40}{reason}",
                    remedy="correct the rows, data.ground_truth_key or reward.rules",
                )
            )
        return problems

    def _without_truth(self, prompts: Iterable[Prompt]) -> list[Problem]:
        names = [rule.value for rule, _ in self._verifiers if rule in NEED_TRUTH]
        empty = (prompt for prompt in prompts if names and not prompt.ground_truth.strip())
        first = next(empty, None)
        if first is None:
            return []
        count = 1 + sum(1 for _ in empty)
        return [
            Problem(
                "every row",
                f"must have a ground truth with algorithm.verifier_function={names[0]}; "
                f"{count} have none, the first is prompt {first.index} ({first.text!r:.40})",
                remedy="correct the rows or data.ground_truth_key",
            )
        ]

    def _refuse(self, prompt: Prompt) -> str | None:
        """Return ": REASON" or "" if the prompt cannot be scored, None if it can."""
        truth, rule = prompt.ground_truth, self._rules[prompt.data_source]
        if rule in ACCEPTS:
            try:
                return None if ACCEPTS[rule](truth) else ""
            except ValueError as error:
                return f": {error}"
        if rule in _WITHOUT_TRUTH:
            return None
        good = truth.strip() and (rule in _SLOW or rule(truth, truth).score > 0)
        return None if good else ""

    def _unknown_sources(self, counts: Mapping[str, int]) -> list[Problem]:
        return [
            Problem(
                f"data source {source!r} ({count} rows)",
                f"must have a rule; known are {', '.join(sorted(self._rules))}",
                remedy=f"set reward.rules.{source} to one of {', '.join(sorted(RULES))}",
            )
            for source, count in counts.items()
        ]
