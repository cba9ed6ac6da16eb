"""The older toolkit's rule verifiers (`algorithm.verifier_function`).

Pure functions from two texts; several verifiers give a weighted sum. Answers are compared as
numbers or as normalised LaTeX, without an algebra system: `x+1` and `1+x` are different answers.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import partial

from mindspeed_rlxf.config.enums import Verifier
from mindspeed_rlxf.rewards.answers import CHOICES, find_choice, format_score
from mindspeed_rlxf.rewards.expressions import is_same, read_answer
from mindspeed_rlxf.rewards.latex import after_thoughts, find_boxed, find_said
from mindspeed_rlxf.rewards.numbers import final_number, last_number, marked_number
from mindspeed_rlxf.rewards.rules import BUILTIN_SOURCES, RewardResult
from mindspeed_rlxf.rewards.verl_rules import (
    gsm8k_verl_answer,
    math_dapo_answer,
    math_verl_answer,
)

_TAGS = ("<think>", "</think>", "<answer>", "\\boxed{", "</answer>")
_STEP = re.compile(r"Step \d+:|^\d+\.|\n-|\n\*|First,|Second,|Next,|Finally,", re.MULTILINE)
_NUMBER = re.compile(r"-?(?:\d[\d,]*\.?\d*|\.\d+)")


def accuracy(response: str, ground_truth: str) -> float:
    r"""Score 1 if the last \boxed{} `is_same_answer`, -0.5 if not, -1 without a box."""
    answer = find_boxed(response)
    if answer is None:
        return -1.0
    return 1.0 if is_same_answer(answer, ground_truth) else -0.5


def base_accuracy(response: str, ground_truth: str) -> float:
    """Score 1 if the response's answer (`find_answer`) is the ground truth, else 0."""
    return 1.0 if is_same_answer(find_answer(response), ground_truth) else 0.0


def strict_format(response: str, ground_truth: str = "") -> float:
    """Score 1 if the response has each tag once, in order, from end to end; else -1.

    The first tag may be at the end of the prompt.
    """
    text = response.strip()
    if _TAGS[0] not in text:
        text = _TAGS[0] + text
    positions = [text.find(tag) for tag in _TAGS]
    has_each_once = all(text.count(tag) == 1 for tag in _TAGS)
    is_enclosed = text.startswith(_TAGS[0]) and text.endswith(_TAGS[-1])
    return 1.0 if has_each_once and is_enclosed and positions == sorted(positions) else -1.0


def steps(response: str, ground_truth: str = "") -> float:
    """Score 1/3 for each step marker ("Step 1:", "1.", a bullet, "First,"), at most 1."""
    return min(1.0, len(_STEP.findall(response)) / 3)


FUNCTIONS: dict[Verifier, Callable[[str, str], float]] = {
    Verifier.ACC: accuracy,
    Verifier.BASE_ACC: base_accuracy,
    Verifier.FORMAT: format_score,
    Verifier.STRICT_FORMAT: strict_format,
    Verifier.STEP: steps,
}
NEED_TRUTH = (Verifier.ACC, Verifier.BASE_ACC)


def verify(
    verifiers: Sequence[tuple[Verifier, float]], response: str, ground_truth: str
) -> RewardResult:
    """Return the weighted sum over verifiers; the parts are not weighted."""
    parts = {rule.value: FUNCTIONS[rule](response, ground_truth) for rule, _ in verifiers}
    score = sum(parts[rule.value] * weight for rule, weight in verifiers)
    return RewardResult(score, {**parts})


def find_answer(text: str) -> str:
    """Return the last boxed answer, else after the last "the answer is", else the last number.

    "final answer is" counts too; such an answer ends with its sentence or line. "" without any.
    """
    answer = find_boxed(text)
    if answer is None:
        answer = find_said(text)
    if answer is None:
        answer = (_NUMBER.findall(text) or [""])[-1]
    return answer


def is_same_answer(answer: str, ground_truth: str) -> bool:
    r"""Whether two answers are equal: as numbers, times or texts, else as LaTeX without spacing.

    1/2 = 0.5 = \frac{1}{2}, 1,000 = 1000. In a whole solution, the ground truth is the last box,
    else the text after the last `####`. False if either is empty.
    """
    truth = find_boxed(ground_truth) or ground_truth.rpartition("####")[2]
    return bool(is_same(read_answer(answer), read_answer(truth)))


Extract = Callable[[str], str | None]


def _as_text(find: Callable[[str], Fraction | None], response: str) -> str | None:
    number = find(response)
    return None if number is None else str(number)


def whole_text(response: str) -> str:
    """Return the whole response in lower case, with white space as single spaces."""
    return " ".join(response.split()).casefold()


def boxed_answer(response: str) -> str | None:
    """Return the last boxed answer, normalised; None without a box."""
    return _normalise_answer(find_boxed(response) or "") or None


def final_answer(response: str) -> str | None:
    """Return the boxed or stated answer, else the last number, normalised; "" without any."""
    return _normalise_answer(find_answer(after_thoughts(response)))


def _normalise_answer(text: str) -> str:
    answer = read_answer(text)
    return answer.text if answer.number is None else str(answer.number)


OF_RULES: dict[str, Extract] = {
    "exact_match": str.strip,
    "gsm8k": partial(_as_text, final_number),
    "gsm8k_strict": partial(_as_text, marked_number),
    "gsm8k_flexible": partial(_as_text, last_number),
    "math": final_answer,
    "gsm8k_verl": gsm8k_verl_answer,
    "math_verl": math_verl_answer,
    "math_dapo_verl": math_dapo_answer,
    "multiple_choice": partial(find_choice, choices=CHOICES),
}
"""Name of a rule -> function that finds the answer it reads; `whole_text` for other rules."""
OF_VERIFIERS: dict[Verifier, Extract] = {
    Verifier.ACC: boxed_answer,
    Verifier.BASE_ACC: final_answer,
}


def find_answers(
    responses: Sequence[str],
    data_sources: Sequence[str],
    rules: Mapping[str, str],
    verifiers: Sequence[tuple[Verifier, float]] = (),
) -> list[str | None]:
    """Return each response's answer as its scorer reads it, None without one.

    The scorer is the data source's rule, or the first verifier that compares answers. Rules and
    verifiers without an extractor here take the whole text.
    """
    table = BUILTIN_SOURCES | dict(rules)
    extracts = [OF_RULES.get(table.get(source, ""), whole_text) for source in data_sources]
    if verifiers:
        comparing = [OF_VERIFIERS[rule] for rule, _ in verifiers if rule in OF_VERIFIERS]
        extract = comparing[0] if comparing else whole_text
        extracts = [extract] * len(responses)
    answers = []
    for extract, response in zip(extracts, responses, strict=True):
        answers.append(extract(response) or None)
    return answers
