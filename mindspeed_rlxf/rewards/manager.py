"""Score responses by their data source's rule, or by verifiers."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mindspeed_rlxf.config.enums import Verifier
from mindspeed_rlxf.config.problems import Problem, UserError
from mindspeed_rlxf.data.prompts import Prompt
from mindspeed_rlxf.rewards import programs  # noqa: F401  registers its rules
from mindspeed_rlxf.rewards.expressions import needs_parser
from mindspeed_rlxf.rewards.rules import (
    ACCEPTS,
    BUILTIN_SOURCES,
    RULES,
    RULES_WITHOUT_TRUTH,
    SLOW_RULES,
    RewardResult,
    arguments_of,
)
from mindspeed_rlxf.rewards.truths import find_unparsed
from mindspeed_rlxf.rewards.verifiers import NEED_TRUTH, verify

MAX_NAMED = 10  # rows in a message


class RewardManager:
    """Scores responses in this process, by verifiers if there are some, else by rules.

    `rules` map data sources to rule names and override the built-in table.
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
        self._rules = BUILTIN_SOURCES | dict(rules)
        self._verifiers = list(verifiers)

    def score(
        self,
        response_texts: Sequence[str],
        ground_truths: Sequence[str],
        data_sources: Sequence[str],
        extra_infos: Sequence[Mapping[str, Any]] = (),
    ) -> list[RewardResult]:
        """Score each response; without verifiers, each data source needs a rule (`check`).

        `extra_infos` are the rows' other columns, for the rule `agent`.

        A rule that returns None (not applicable) scores 0: nothing else scores the response.
        """
        if self._verifiers:
            pairs = zip(response_texts, ground_truths, strict=True)
            return [verify(self._verifiers, response, truth) for response, truth in pairs]
        columns = extra_infos or [{}] * len(response_texts)
        results = []
        for response, truth, source, extra_info in zip(
            response_texts, ground_truths, data_sources, columns, strict=True
        ):
            rule = self._rules[source]
            results.append(RULES[rule](response, truth, **arguments_of(rule, extra_info)))
        return [RewardResult(result.score or 0.0, result.parts) for result in results]

    def check(self, prompts: Iterable[Prompt]) -> list[Problem]:
        """Return a problem for each data source with prompts that cannot be scored.

        A ground truth must be accepted by the rule's ACCEPTS function, else score above 0 as a
        response to itself. Verifiers that read it only need it to be there.
        """
        refused: dict[str, list[int]] = {}  # data source -> rows
        firsts: dict[str, tuple[Prompt, str]] = {}
        for prompt in prompts:  # once, since they may be read from a disk
            if (reason := self._refuse(prompt)) is not None:
                refused.setdefault(prompt.data_source, []).append(prompt.index)
                firsts.setdefault(prompt.data_source, (prompt, reason))
        problems = []
        for source, (first, reason) in firsts.items():
            rule = f"must have a rule; known are {', '.join(sorted(self._rules))}"
            remedy = f"set reward.rules.{source} to one of {', '.join(sorted(RULES))}"
            if self._verifiers or source in self._rules:
                found = (
                    f"{first.index} ({first.text!r:.40}) with {first.ground_truth!r:.40}{reason}"
                )
                rule = (
                    f"must have ground truths to compare with; the first without is prompt {found}"
                )
                remedy = "correct the rows, data.ground_truth_key or reward.rules"
                others = refused[source][1 : MAX_NAMED + 1]
                if others:
                    rule += f"; also {', '.join(f'prompt {index}' for index in others)}"
            problems.append(
                Problem(
                    f"data source {source!r} ({len(refused[source])} rows)", rule, remedy=remedy
                )
            )
        return problems

    def find_unparsed(self, prompts: Iterable[Prompt]) -> list[str]:
        """Return a line for each data source with truths that only an equal text can match.

        They are LaTeX that math-verify cannot parse. May start a process (`truths`).
        """
        rows: dict[tuple[str, str], list[int]] = {}
        for prompt in prompts:
            is_math = not self._verifiers and self._rules.get(prompt.data_source) == "math"
            if is_math and needs_parser(prompt.ground_truth):
                key = prompt.data_source, prompt.ground_truth
                rows.setdefault(key, []).append(prompt.index)
        unparsed = set(find_unparsed([*dict.fromkeys(truth for _, truth in rows)]))
        by_source: dict[str, list[str]] = {}
        for (source, truth), indices in rows.items():
            if truth in unparsed:
                named = by_source.setdefault(source, [])
                named += [f"prompt {index} ({truth!r:.40})" for index in indices]
        return [
            f"data source {source!r}: {len(named)} ground truths cannot be parsed, so that only "
            f"the same LaTeX scores: {', '.join(named[:MAX_NAMED])}"
            + ", ..."
            * (len(named) > MAX_NAMED)
            for source, named in by_source.items()
        ]

    def _refuse(self, prompt: Prompt) -> str | None:
        """Return ": REASON" or "" if the prompt cannot be scored, None if it can."""
        truth, rule = prompt.ground_truth, self._rules.get(prompt.data_source, "")
        if self._verifiers:
            is_read = any(verifier in NEED_TRUTH for verifier, _ in self._verifiers)
            return "" if is_read and not truth.strip() else None
        if rule in ACCEPTS:
            try:
                return None if ACCEPTS[rule](truth) else ""
            except ValueError as error:
                return f": {error}"
        if rule in RULES_WITHOUT_TRUTH:
            return None
        good = (
            rule
            and truth.strip()
            and (rule in SLOW_RULES or (RULES[rule](truth, truth).score or 0.0) > 0)
        )
        return None if good else ""
