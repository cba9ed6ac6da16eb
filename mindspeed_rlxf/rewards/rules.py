"""Rules that score a response by the expected answer: pure functions of two texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import wraps
from typing import Any, TypeAlias

from mindspeed_rlxf.config.registry import add
from mindspeed_rlxf.config.reward_calls import RULES_OF_PROGRAMS
from mindspeed_rlxf.rewards.answers import format_score, length_score, math_score, multiple_choice
from mindspeed_rlxf.rewards.numbers import final_number, last_number, marked_number


@dataclass(frozen=True)
class RewardResult:
    """Score of one response, and its parts, which are logged as metrics.

    parts of the built-in rules: {"accuracy": 1.0 right, 0.0 wrong}
    """

    score: float
    parts: dict[str, float] = field(default_factory=dict)


Rule: TypeAlias = Callable[..., RewardResult]
"""(response, ground_truth, arguments of reward.functions) -> result.

A ground truth given as the response must score above 0, but for rules of ACCEPTS.
"""


def exact_match(response: str, ground_truth: str) -> RewardResult:
    """Score 1 when the response equals the ground truth but for white space around both, else 0."""
    return _right_or_wrong(response.strip() == ground_truth.strip())


def gsm8k(response: str, ground_truth: str) -> RewardResult:
    """Score 1 when both texts answer with the same number, else 0 (arXiv:2110.14168).

    The answer of a text is the number after its first `####`, else the one in its last \\boxed{},
    else its last number; the ground truth may be the bare number or the data set's whole solution.
    Numbers are compared by value: 1,000 = 1000.0 = $1000.
    """
    return _same_number(final_number(response), ground_truth)


def gsm8k_strict(response: str, ground_truth: str) -> RewardResult:
    """As `gsm8k`; the response has to mark its answer by `####`."""
    return _same_number(marked_number(response), ground_truth)


def gsm8k_flexible(response: str, ground_truth: str) -> RewardResult:
    """As `gsm8k`; the answer of the response is its last number, whatever it marks."""
    return _same_number(last_number(response), ground_truth)


def _same_number(found: Fraction | None, ground_truth: str) -> RewardResult:
    return _right_or_wrong(found is not None and found == final_number(ground_truth))


def _as_rule(score: Callable[..., float]) -> Rule:
    """Make a rule of a function that returns 1 for right and 0 for wrong."""

    @wraps(score)
    def rule(response: str, ground_truth: str, **arguments: Any) -> RewardResult:
        value = score(response, ground_truth, **arguments)
        return RewardResult(score=value, parts={"accuracy": value})

    return rule


RULES: dict[str, Rule] = {
    "exact_match": exact_match,
    "gsm8k": gsm8k,
    "gsm8k_strict": gsm8k_strict,
    "gsm8k_flexible": gsm8k_flexible,
    "math": _as_rule(math_score),
    "multiple_choice": _as_rule(multiple_choice),
    "format": _as_rule(format_score),
    "length": _as_rule(length_score),
}
"""Name in `reward.rules` and `reward.functions` -> rule."""

OWN_RULES = frozenset(RULES) | RULES_OF_PROGRAMS
"""Those of the package; the others are of plugins."""
SLOW_RULES = frozenset({"math"}) | RULES_OF_PROGRAMS
"""Rules that run in scoring processes alone, because they may take any time."""
RULES_WITHOUT_TRUTH = frozenset({"format", "length"})
"""Rules that do not read the ground truth."""

BUILTIN_SOURCES = {
    "arithmetic": "exact_match",
    "gsm8k": "gsm8k",
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "hendrycks/competition_math": "math",
    "Rowan/hellaswag": "multiple_choice",
}
"""Data source -> name of the rule that needs no configuration."""
BUILTIN_RULES: dict[str, Rule] = {source: RULES[name] for source, name in BUILTIN_SOURCES.items()}


ACCEPTS: dict[Rule, Callable[[str], bool]] = {}
"""Rule -> whether it can score responses by a ground truth, where that is not an answer itself.

The function may raise ValueError in place of returning False: the text is shown as the reason.
"""


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
