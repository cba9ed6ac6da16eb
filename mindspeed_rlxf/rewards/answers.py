"""Scores for the built-in choice, format and length rules, and for mathematics."""

import logging
import re
from fractions import Fraction

MAX_DIGITS = 4000  # characters of a number; longer ones are ignored
ANSWER_MARK = "####"

# A sign (not the operator of "20-5"), a dollar sign; then a LaTeX fraction, or digits with or
# without thousands separators and decimals.
_NUMBER = re.compile(
    r"(?P<minus>(?<![\w)])[-\u2212])?\$?"
    r"(?:\\[dt]?frac\{(?P<top>[0-9]+)\}\{(?P<bottom>[0-9]+)\}"
    r"|(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+))"
)
_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|\\,|\\!,|\\ )(?=[0-9]{3}(?![0-9]))")


def marked_number(text: str) -> Fraction | None:
    """Return the first number after a text's first `####`, None without one."""
    return next(iter(find_numbers(text.partition(ANSWER_MARK)[2])), None)


def boxed_number(text: str) -> Fraction | None:
    r"""Return the last number in the last `\boxed{...}`; None without a number or a box."""
    return last_number(find_boxed(text) or "")


def last_number(text: str) -> Fraction | None:
    """Return the last number in a text, None without one."""
    numbers = find_numbers(text)
    return numbers[-1] if numbers else None


def final_number(text: str) -> Fraction | None:
    """Return the first number after `####`, else the last in the last box, else the last."""
    found = (find(text) for find in (marked_number, boxed_number, last_number))
    return next((number for number in found if number is not None), None)


def find_numbers(text: str) -> list[Fraction]:
    """List all numbers in a text, in order, as exact fractions."""
    text = _THOUSANDS.sub(",", text).replace("\\$", "$")
    values = []
    for match in _NUMBER.finditer(text):
        if len(match[0]) <= MAX_DIGITS and (match["digits"] or int(match["bottom"])):
            digits = match["digits"] or f"{match['top']}/{match['bottom']}"
            value = Fraction(digits.replace(",", ""))
            values.append(-value if match["minus"] else value)
    return values


def find_boxed(text: str) -> str | None:
    r"""Return the last \boxed{...} content; None without one or if it is not closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    start += len("\\boxed{")
    depth = 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end]
    return None


# Each tag once. The first may be at the end of the prompt, where some chat templates write it.
_NO_TAG = r"(?:(?!</?(?:think|answer)>).)*"
THINK = rf"\s*(?:<think>)?{_NO_TAG}</think>\s*<answer>{_NO_TAG}</answer>\s*"
CHOICES = "ABCDEFGHIJ"
# For texts whose white space is single characters: several `\s*` in a row take cubic time.
_SAID = re.compile(
    r"(?i:answer|choice|option)\s?(?:(?i:is)|:)?\s?:?\s?\**\(?(?:([A-Z])\b|([a-z])\b(?! ?\w))"
)
_ALONE = re.compile(r"[\s(\[*]*([A-Z])[\s)\].:*]*")
_WRAPPED = re.compile(r"\\text(?:bf|rm)?\{([^{}]*)\}")


def multiple_choice(response: str, ground_truth: str, choices: str = CHOICES) -> float:
    """Score 1 if the response chooses the ground truth's letter (`find_choice`), else 0.

    The ground truth is the letter alone, or a text that chooses one; else the score is 0.
    """
    expected = _letter_alone(ground_truth, choices) or find_choice(ground_truth, choices)
    return float(expected is not None and find_choice(response, choices) == expected)


def find_choice(text: str, choices: str) -> str | None:
    r"""Return the letter from `choices` that a text chooses, None without one.

    The first that applies decides:
    - the last \boxed{}: its content must be the letter
    - the last `####`: the text after it must be the letter
    - the last "answer", "choice" or "option" before a letter, optionally with "is" or a colon
      between. The letter may be lower case, but not before a word ("is a triangle")
    - the last line: it must be the letter, or end with it in parentheses
    """
    if (boxed := find_boxed(text)) is not None:
        return _letter_alone(_WRAPPED.sub(r"\1", boxed), choices)
    if ANSWER_MARK in text:
        return _letter_alone(text.rpartition(ANSWER_MARK)[2], choices)
    joined = re.sub(r"\s+", lambda space: "\n" if "\n" in space[0] else " ", text)
    said = [(upper or lower.upper()) for upper, lower in _SAID.findall(joined)]
    if said := [letter for letter in said if letter in choices]:
        return said[-1]
    last = (text.strip().splitlines() or [""])[-1]
    if end := re.search(r"\(([A-Z])\)[.\s]*$", last):
        last = end[1]
    return _letter_alone(last, choices)


def _letter_alone(text: str, choices: str) -> str | None:
    found = _ALONE.fullmatch(text)
    return found[1] if found and found[1] in choices else None


def format_score(response: str, ground_truth: str = "", pattern: str = THINK) -> float:
    """Score 1 if the whole response matches the pattern, else 0.

    In `pattern`, `.` matches line ends; the default is a <think> element, which the prompt may have
    opened, then an <answer> element, with each tag once.
    """
    return float(re.fullmatch(pattern, response, re.DOTALL) is not None)


def length_score(
    response: str, ground_truth: str = "", max_characters: int = 4000, min_characters: int = 0
) -> float:
    """Score the response length in characters, without white space at its ends.

    0 below min_characters, 1 up to max_characters, then max_characters / length.
    """
    length = len(response.strip())
    if length < min_characters:
        return 0.0
    return 1.0 if length <= max_characters else max_characters / length


def math_score(response: str, ground_truth: str) -> float:
    r"""Score 1 if the response's answer equals the ground truth as an expression, else 0.

    math-verify parses and compares the expressions; its errors propagate. It may run without bound:
    its own timeouts are off, because they are signals, and signals work only in main threads. So
    the rule runs in processes with a deadline. The ground truth is LaTeX, or a solution with the
    answer in its last \boxed{}.
    """
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of time-outs that are off
    boxed = find_boxed(ground_truth)
    truth = (ground_truth if boxed is None else boxed).strip().strip("$")
    expected = math_verify.parse(f"\\boxed{{{truth}}}", parsing_timeout=None, raise_on_error=True)
    answer = math_verify.parse(response, parsing_timeout=None, raise_on_error=True)
    return float(math_verify.verify(expected, answer, timeout_seconds=None, raise_on_error=True))
