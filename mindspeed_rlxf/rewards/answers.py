"""Scores of the built-in rules for choices, formats and lengths, and of mathematics."""

from __future__ import annotations

import logging
import re

from mindspeed_rlxf.rewards.numbers import ANSWER_MARK, find_boxed

THINK = r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*"
CHOICES = "ABCDEFGHIJ"
_SAID = re.compile(r"(?:answer|choice|option)\s*(?:is|:)?\s*:?\s*\**\(?([A-Z])\b", re.IGNORECASE)
_ALONE = re.compile(r"[\s(\[*]*([A-Z])[\s)\].:*]*")
_WRAPPED = re.compile(r"\\text(?:bf|rm)?\{([^{}]*)\}")


def multiple_choice(response: str, ground_truth: str, choices: str = CHOICES) -> float:
    """Score 1 when the response chooses the letter of the ground truth, else 0.

    Its choice is the letter in its last \\boxed{}, else after `####`, else after its last "answer
    is", else the letter that is its last line or stands alone in parentheses at its end.
    """
    expected = _letter_alone(ground_truth, choices) or find_choice(ground_truth, choices)
    return float(expected is not None and find_choice(response, choices) == expected)


def find_choice(text: str, choices: str) -> str | None:
    """Return the letter that a text chooses, None without one."""
    if (boxed := find_boxed(text)) is not None:
        return _letter_alone(_WRAPPED.sub(r"\1", boxed), choices)
    if ANSWER_MARK in text:
        return _letter_alone(text.rpartition(ANSWER_MARK)[2], choices)
    if said := [s.upper() for s in _SAID.findall(text) if s.upper() in choices]:
        return said[-1]
    last = (text.strip().splitlines() or [""])[-1]
    if end := re.search(r"\(([A-Z])\)[.\s]*$", last):
        last = end[1]
    return _letter_alone(last, choices)


def _letter_alone(text: str, choices: str) -> str | None:
    found = _ALONE.fullmatch(text)
    return found[1] if found and found[1] in choices else None


def format_score(response: str, ground_truth: str = "", pattern: str = THINK) -> float:
    """Score 1 when the whole response matches, else 0.

    pattern: a regular expression in which `.` matches line ends; by default a <think> part, then an
             <answer> part
    """
    return float(re.fullmatch(pattern, response, re.DOTALL) is not None)


def length_score(
    response: str, ground_truth: str = "", max_characters: int = 4000, min_characters: int = 0
) -> float:
    """Score 1 within the lengths; above, the share of the response that was allowed; below, 0."""
    length = len(response.strip())
    if length < min_characters:
        return 0.0
    return 1.0 if length <= max_characters else max_characters / length


def math_score(response: str, ground_truth: str) -> float:
    """Score 1 when the answer equals the ground truth as a mathematical expression, else 0.

    Expressions are read and compared by math-verify, without its own time-outs: they are signals,
    which reach main threads only. So this runs in processes that a deadline ends.

    ground_truth: LaTeX, or a solution whose last \\boxed{} is the answer
    """
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # of the time-outs
    boxed = find_boxed(ground_truth)
    truth = (ground_truth if boxed is None else boxed).strip().strip("$")
    given = math_verify.parse(f"\\boxed{{{truth}}}", parsing_timeout=None, raise_on_error=True)
    found = math_verify.parse(response, parsing_timeout=None, raise_on_error=True)
    right = math_verify.verify(given, found, timeout_seconds=None, raise_on_error=True)
    return float(right)
