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
            problems = []
            remedy = f"use one of {', '.join(sorted(RULES))}"
            for source, name in unknown.items():
                key = f"reward.rules.{source}"
                problems.append(Problem(key, "must name a rule", repr(name), remedy))
            raise UserError(problems)
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
        columns = extra_infos or [{}] * len(response_texts)
        results = []
        for response, truth, source, extra_info in zip(
            response_texts, ground_truths, data_sources, columns, strict=True
        ):
            if self._verifiers:
                results.append(verify(self._verifiers, response, truth))
                continue
            rule = self._rules[source]
            result = RULES[rule](response, truth, **arguments_of(rule, extra_info))
            results.append(RewardResult(result.score or 0.0, result.parts))
        return results

    def check(self, prompts: Iterable[Prompt]) -> list[Problem]:
        """Return a problem for each data source with prompts that cannot be scored.

        A ground truth must be accepted by the rule's ACCEPTS function, else score above 0 as a
        response to itself. Verifiers that read it only need it to be there.
        """
        refused_rows: dict[str, list[int]] = {}  # by data source
        first_prompts: dict[str, tuple[Prompt, str]] = {}  # with the reason
        for prompt in prompts:  # once, since they may be read from a disk
            reason = self._refuse(prompt)
            if reason is not None:
                refused_rows.setdefault(prompt.data_source, []).append(prompt.index)
                first_prompts.setdefault(prompt.data_source, (prompt, reason))
        problems = []
        for source, (prompt, reason) in first_prompts.items():
            rows = refused_rows[source]
            if self._verifiers or source in self._rules:
                rule = (
                    "must have ground truths to compare with; the first without is prompt "
                    f"{prompt.index} ({prompt.text!r:.40}) with {prompt.ground_truth!r:.40}{reason}"
                )
                remedy = "correct the rows, data.ground_truth_key or reward.rules"
                if len(rows) > 1:
                    listed = ", ".join(f"prompt {row}" for row in rows[1 : MAX_NAMED + 1])
                    rule += f"; also {listed}"
            else:
                rule = f"must have a rule; known are {', '.join(sorted(self._rules))}"
                remedy = f"set reward.rules.{source} to one of {', '.join(sorted(RULES))}"
            key = f"data source {source!r} ({len(rows)} rows)"
            problems.append(Problem(key, rule, remedy=remedy))
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
        unparsed_prompts: dict[str, list[str]] = {}  # by data source
        for (source, truth), indices in rows.items():
            if truth in unparsed:
                listed = unparsed_prompts.setdefault(source, [])
                listed += [f"prompt {index} ({truth!r:.40})" for index in indices]
        lines = []
        for source, listed in unparsed_prompts.items():
            examples = ", ".join(listed[:MAX_NAMED])
            if len(listed) > MAX_NAMED:
                examples += ", ..."
            lines.append(
                f"data source {source!r}: {len(listed)} ground truths cannot be parsed, so that "
                f"only the same LaTeX scores: {examples}"
            )
        return lines

    def _refuse(self, prompt: Prompt) -> str | None:
        """Return ": REASON" or "" if the prompt cannot be scored, None if it can."""
        truth = prompt.ground_truth
        rule = self._rules.get(prompt.data_source, "")
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
        if not rule or not truth.strip():
            return ""
        if rule in SLOW_RULES:  # they run in scoring processes alone
            return None
        score = RULES[rule](truth, truth).score or 0.0
        return None if score > 0 else ""
