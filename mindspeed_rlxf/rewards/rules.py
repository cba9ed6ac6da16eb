"""Rules that score a response by the expected answer: pure functions of two texts."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TypeAlias

from mindspeed_rlxf.config.registry import add


@dataclass(frozen=True)
class RewardResult:
    """Score of one response, and its parts, which are logged as metrics.

    parts of the built-in rules: {"accuracy": 1.0 right, 0.0 wrong}
    """

    score: float
    parts: dict[str, float] = field(default_factory=dict)


Rule: TypeAlias = Callable[[str, str], RewardResult]
"""(response, ground_truth) -> result. A ground truth given as the response must score above 0, but
for rules of ACCEPTS."""

# A sign (not the operator of "20-5"), a dollar sign, digits with or without thousands separators,
# decimals. Only the digits are required.
_NUMBER = re.compile(
    r"(?P<minus>(?<![\w)])[-\u2212])?\$?"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)
_ANSWER_MARK = "####"


def exact_match(response: str, ground_truth: str) -> RewardResult:
    """Score 1 when the response equals the ground truth but for white space around both, else 0."""
    return _right_or_wrong(response.strip() == ground_truth.strip())


def gsm8k(response: str, ground_truth: str) -> RewardResult:
    """Score 1 when both texts answer with the same number, else 0 (arXiv:2110.14168).

    The answer of a text is the number after its first `####`, else its last number; the ground
    truth may be the bare number or the data set's whole solution. Numbers are compared by value:
    1,000 = 1000.0 = $1000.
    """
    expected = _final_number(ground_truth)
    return _right_or_wrong(expected is not None and _final_number(response) == expected)


RULES: dict[str, Rule] = {"exact_match": exact_match, "gsm8k": gsm8k}
"""Name in `reward.rules` -> rule."""

BUILTIN_RULES: dict[str, Rule] = {
    "arithmetic": exact_match,
    "gsm8k": gsm8k,
    "openai/gsm8k": gsm8k,
}
"""Data source -> rule that needs no configuration."""


ACCEPTS: dict[Rule, Callable[[str], bool]] = {}
"""Rule -> whether it can score responses by a ground truth, where that is not an answer itself."""


def register_rule(
    name: str, accepts: Callable[[str], bool] | None = None
) -> Callable[[Rule], Rule]:
    """Decorate a function to make it a choice of `reward.rules`.

    accepts: its entry in ACCEPTS
    Raises ValueError for a name that is taken.
    """

    def register(rule: Rule) -> Rule:
        add(RULES, name, rule, "reward rule")
        if accepts is not None:
            ACCEPTS[rule] = accepts
        return rule

    return register


def _right_or_wrong(right: bool) -> RewardResult:
    accuracy = 1.0 if right else 0.0
    return RewardResult(score=accuracy, parts={"accuracy": accuracy})


def _final_number(text: str) -> Decimal | None:
    """Return the number that a text answers with, None when it has none."""
    marked = _find_numbers(text.partition(_ANSWER_MARK)[2])
    numbers = marked[:1] or _find_numbers(text)[-1:]
    return numbers[0] if numbers else None


def _find_numbers(text: str) -> list[Decimal]:
    """List all numbers written in a text, in order."""
    values = []
    for match in _NUMBER.finditer(text):
        value = Decimal(match["digits"].replace(",", ""))
        values.append(value.copy_negate() if match["minus"] else value)  # `-` would round
    return values
