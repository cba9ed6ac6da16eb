"""Rules: scores for responses with an expected answer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import wraps
from typing import Any, TypeAlias

from mindspeed_rlxf.config.registry import add_to
from mindspeed_rlxf.config.reward_section import AGENT_RULE, RULES_OF_PROGRAMS
from mindspeed_rlxf.data.agent_record import find_record
from mindspeed_rlxf.rewards import verl_rules
from mindspeed_rlxf.rewards.answers import (
    format_score,
    length_score,
    math_score,
    multiple_choice,
    search_score,
    search_targets,
)
from mindspeed_rlxf.rewards.expressions import accepts_math_truth
from mindspeed_rlxf.rewards.numbers import final_number, last_number, marked_number


@dataclass(frozen=True)
class RewardResult:
    """A response's score, and its parts: numbers become metrics, text stays with the sample.

    Built-in rules have the part {"accuracy": 1.0 right, 0.0 wrong}; `length` puts its score there,
    and rules that run programs add "passed". A score None means "not applicable": it is left out of
    a weighted sum.
    """

    score: float | None
    parts: dict[str, float | str] = field(default_factory=dict)


Rule: TypeAlias = Callable[..., RewardResult]
"""(response, ground_truth, arguments of reward.functions) -> result.

A ground truth given as the response must score above 0, except for ACCEPTS and RULES_WITHOUT_TRUTH.
"""


def _as_rule(score: Callable[..., float]) -> Rule:

    @wraps(score)
    def rule(response: str, ground_truth: str, **arguments: Any) -> RewardResult:
        value = score(response, ground_truth, **arguments)
        return RewardResult(score=value, parts={"accuracy": value})

    return rule


@_as_rule
def exact_match(response: str, ground_truth: str) -> float:
    """Score 1 if response and ground truth are equal up to surrounding white space, else 0."""
    return float(response.strip() == ground_truth.strip())


@_as_rule
def gsm8k(response: str, ground_truth: str) -> float:
    r"""Score 1 if both texts give the same number as their answer, else 0 (arXiv:2110.14168).

    A text's answer is the number after its first `####`, else in its last \boxed{}, else its last
    number. The ground truth may be the bare number or the whole solution. Numbers are compared by
    value: 1,000 = 1000.0 = $1000. A response without a number scores 0.
    """
    return _same_number(final_number(response), ground_truth)


@_as_rule
def gsm8k_strict(response: str, ground_truth: str) -> float:
    """Score as `gsm8k`, but read only the number after the response's first `####`."""
    return _same_number(marked_number(response), ground_truth)


@_as_rule
def gsm8k_flexible(response: str, ground_truth: str) -> float:
    """Score as `gsm8k`, but read the response's last number, whatever is marked."""
    return _same_number(last_number(response), ground_truth)


def _same_number(answer: Fraction | None, ground_truth: str) -> float:
    return float(answer is not None and answer == final_number(ground_truth))


def math_dapo_verl(response: str, ground_truth: str) -> RewardResult:
    """Score 1 if verl's rule for `math_dapo` finds the response right, else -1, with its answer."""
    is_right, answer = verl_rules.math_dapo_verl(response, ground_truth)
    parts: dict[str, float | str] = {"accuracy": float(is_right), "pred": answer or ""}
    return RewardResult(1.0 if is_right else -1.0, parts)


def agent_score(
    response: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None
) -> RewardResult:
    """Score what the sample's agent has given by `Session.reward`, with its parts.

    A sample without an agent scores 0.
    """
    record = find_record(extra_info or {})
    return RewardResult(0.0) if record is None else RewardResult(record.score, {**record.parts})


RULES: dict[str, Rule] = {
    "exact_match": exact_match,
    "gsm8k": gsm8k,
    "gsm8k_strict": gsm8k_strict,
    "gsm8k_flexible": gsm8k_flexible,
    "gsm8k_verl": _as_rule(verl_rules.gsm8k_verl),
    "math": _as_rule(math_score),
    "math_verl": _as_rule(verl_rules.math_verl),
    "math_dapo_verl": math_dapo_verl,
    "multiple_choice": _as_rule(multiple_choice),
    "search_qa": _as_rule(search_score),
    "format": _as_rule(format_score),
    "length": _as_rule(length_score),
    AGENT_RULE: agent_score,
}
"""Name in `reward.rules` and `reward.functions` -> rule."""

OWN_RULES = frozenset(RULES) | RULES_OF_PROGRAMS
"""Names of the package's rules; the other rules come from plugins."""
SLOW_RULES = frozenset({"math"}) | RULES_OF_PROGRAMS
"""Rules that run only in scoring processes, because they may take any time."""
RULES_WITHOUT_TRUTH = frozenset({"format", "length", AGENT_RULE})
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
    "hiyouga/geometry3k": "math",
    **dict.fromkeys(
        ("math", "math_dapo", "math_dapo_reasoning", "aime", "aime24", "aime25", "aime2024",
         "aime2025", "aime_2024", "aime_2025", "numina_aops_forum", "numina_synthetic_math",
         "numina_amc_aime", "numina_synthetic_amc", "numina_cn_k12", "numina_olympiads"),
        "math",
    ),
    **dict.fromkeys(("apps", "codecontests", "codeforces", "taco"), "code"),
    **dict.fromkeys(
        ("searchR1_nq", "searchR1_triviaqa", "searchR1_popqa", "searchR1_hotpotqa",
         "searchR1_2wikimultihopqa", "searchR1_musique", "searchR1_bamboogle"),
        "search_qa",
    ),
}  # fmt: skip
"""Data source -> name of its rule, unless `reward.rules` names another."""

ACCEPTS: dict[str, Callable[[str], object]] = {
    "gsm8k_verl": verl_rules.accepts_gsm8k_truth,
    "math": accepts_math_truth,
    "math_verl": verl_rules.accepts_math_truth,
    "math_dapo_verl": verl_rules.accepts_math_dapo_truth,
    "search_qa": search_targets,
}
"""Name of a rule that does not score a ground truth as a response -> whether it accepts one.

The function may raise ValueError in place of returning False: the text is shown as the reason.
"""


def arguments_of(rule: str, extra_info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a rule gets from a row's other columns."""
    return {"extra_info": extra_info} if rule == AGENT_RULE else {}


def register_rule(
    name: str, accepts: Callable[[str], object] | None = None
) -> Callable[[Rule], Rule]:
    """Return a decorator that adds a function to RULES, a choice for `reward.rules`.

    Args:
        name: Rule name; decorating raises ValueError if it is taken.
        accepts: Tests whether a ground truth is valid (ACCEPTS). None = it is valid if it scores
            above 0 as the response.
    """

    def register(rule: Rule) -> Rule:
        add_to(RULES, name, "reward rule")(rule)
        if accepts is not None:
            ACCEPTS[name] = accepts
        return rule

    return register
