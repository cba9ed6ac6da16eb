"""Scores for the built-in choice, format and length rules; that for mathematics is imported."""

import json
import re
import string

from mindspeed_rlxf.rewards.expressions import math_score
from mindspeed_rlxf.rewards.latex import after_thoughts, find_boxed, find_tagged, unwrap_text
from mindspeed_rlxf.rewards.numbers import ANSWER_MARK

__all__ = ["CHOICES", "find_choice", "format_score", "length_score", "math_score",
           "multiple_choice", "search_score", "search_targets"]  # fmt: skip

# Each tag once. The first may be at the end of the prompt, where some chat templates write it.
_NO_TAG = r"(?:(?!</?(?:think|answer)>).)*"
THINK = rf"\s*(?:<think>)?{_NO_TAG}</think>\s*<answer>{_NO_TAG}</answer>\s*"
CHOICES = "ABCDEFGHIJ"
_MARKUP = str.maketrans("~", " ", "*`$")
_DELIMITER = re.compile(r"\\[()\[\]]")
_LATEX_SPACE = re.compile(r"\\(?:[ ,;!]|q?quad\b)")
_OPEN = r"[(\[{<\"']"
_CLOSE = r"[)\]}>\"']"
_ALONE = re.compile(rf"{_OPEN}? ?([A-Z]) ?{_CLOSE}?[ .:]*")
# A letter, then the text of its choice.
_WITH_TEXT = re.compile(rf"(?:{_OPEN} ?([A-Z]) ?{_CLOSE}[:.]?|([A-Z])[).:\]]) ?\S")
# Of a box: a letter before a number without a full stop or parenthesis between.
_BEFORE_NUMBER = re.compile(r"^([A-Z]) ?[-,]? ?([0-9$])")
# A letter (no "I think"), also a small one, but not before a word ("is a triangle").
_LETTER = rf"{_OPEN}?(?:([A-Z])\b(?!(?<=I)(?: [a-z]|['\u2019]))|([a-z])\b(?! ?\w))"
_IS = r"(?:(?:\s(?i:is|was|must be|should be|would be))?:?\s?[:=-]?\s?)"
_IS_ONE = r"(?:\s(?i:is|was|must be|should be|would be):?| ?:)\s?"
_SAID = re.compile(rf"(?:(?i:answer){_IS}|(?i:choice|option){_IS_ONE}|(?i:\bcorrect): ?){_LETTER}")
_IS_CORRECT = re.compile(
    rf"\b([A-Z])()\b{_CLOSE}? is "
    r"(?:correct\b|the (?:(?:correct|right|best) )?(?:answer|choice|option)\b)"
)
_NAMED = re.compile(rf"(?i:choice|option|choose|select|pick) ?{_LETTER}")
_DENIED = re.compile(
    rf"{_CLOSE}? ?(?::|,)? ?(?:(?i:is|are|was|seems|would be|can) ?)?(?:(?i:also|clearly) )?"
    r"(?i:wrong|incorrect|false|not|no\b|out\b|invalid|excluded|eliminated|isn|can't|cannot)"
)
_REFUSED = re.compile(
    r"\b(?i:not|nor|never|eliminate|exclude|reject|unlike|than|rule out) (?:the |choose |pick )?$"
)
# After a letter: further letters up to the end of the line.
_FURTHER = re.compile(rf"{_CLOSE}?(?: ?{_OPEN}?\b[A-Z]\b{_CLOSE}?)+[. ]*(?:\n|$)")
# After a letter: another one that is named with it.
_ANOTHER = re.compile(
    rf"{_CLOSE}?(?: ?(?:,|/|&|;|-|\||\b(?:or|and)\b) ?)+{_OPEN}?([A-Z])\b"
    r"(?! (?:is|was|are|has|does|can|would|must)\b)(?!(?<=I) [a-z]|['\u2019])"
)


def multiple_choice(response: str, ground_truth: str, choices: str = CHOICES) -> float:
    """Score 1 if the response chooses the ground truth's letter (`find_choice`), else 0.

    The ground truth is the letter alone, or a text that chooses one; else the score is 0.
    """
    expected = _letter_alone(ground_truth, choices) or find_choice(ground_truth, choices)
    return float(expected is not None and find_choice(response, choices) == expected)


def find_choice(text: str, choices: str = CHOICES) -> str | None:
    r"""Return the letter from `choices` that a text chooses, None without one or with several.

    The first that applies decides, after the last `</think>`:
    - the last \boxed{} or `<answer>` element: its content is the letter, or begins with it as `B:`
      or `(B)`
    - the last `####`: likewise the text after it
    - the last "answer is B", "correct option: B" and the like; the letter may be lower case, but
      not before a word ("is a triangle")
    - the last "B is correct"
    - the last "option B", "choice B" or "choose B", unless it is called wrong
    - the last line: it is the letter, begins with it, or ends with it in parentheses
    """
    text = after_thoughts(text)
    stated = find_boxed(text)
    if stated is None:
        stated = find_tagged(text)
    if stated is None and ANSWER_MARK in text:
        stated = text.rpartition(ANSWER_MARK)[2]
    if stated is not None:
        stated = _plain(stated)
        loosely = _BEFORE_NUMBER.sub(r"\1: \2", stated)
        return _letter_with_text(loosely, choices) or _said_letter(stated, choices)
    text = _plain(text)
    letter = _said_letter(text, choices)
    if letter is not None:
        return letter or None
    lines = text.split("\n")
    last_line = lines[-1]
    end = re.search(r"\(([A-Z])\)[. ]*$", last_line)
    if end is not None:
        return end[1] if end[1] in choices else None
    num_choices_listed = sum(_WITH_TEXT.match(line) is not None for line in lines)
    if num_choices_listed > 1:
        return _letter_alone(last_line, choices)
    return _letter_with_text(last_line, choices)


def _plain(text: str) -> str:
    """Return a text without Markdown emphasis and LaTeX, with single spaces and line ends."""
    text = text.translate(_MARKUP).replace("__", "")
    if "\\" in text:
        text = _LATEX_SPACE.sub(" ", _DELIMITER.sub("", unwrap_text(text)))
    lines = [" ".join(line.split()) for line in text.split("\n")]
    return "\n".join(line for line in lines if line)


def _said_letter(text: str, choices: str) -> str | None:
    """Return the letter of the last statement of the answer, "" for several, None without one."""
    for pattern in (_SAID, _IS_CORRECT, _NAMED):
        letters = []
        for match in pattern.finditer(text):
            letter = match[1] or match[2].upper()
            before = text[max(0, match.start() - 30) : match.start()]
            is_denied = _DENIED.match(text, match.end()) or _REFUSED.search(before)
            if letter in choices and not (pattern is _NAMED and is_denied):
                another = _ANOTHER.match(text, match.end())
                is_one = another is None or another[1] not in choices
                is_one = is_one and not _FURTHER.match(text, match.end())
                letters.append(letter if is_one else "")
        if letters:
            return letters[-1]
    return None


def _letter_alone(text: str, choices: str) -> str | None:
    match = _ALONE.fullmatch(_plain(text))
    return match[1] if match and match[1] in choices else None


def _letter_with_text(text: str, choices: str) -> str | None:
    """Return the letter that a text is, or that stands before a choice's text."""
    alone = _letter_alone(text, choices)
    begins = None if alone else _WITH_TEXT.match(text)
    if begins is None:
        return alone
    letter = begins[1] or begins[2]
    another = _ANOTHER.match(text, begins.end(1) if begins[1] else begins.end(2))
    if letter not in choices or (another is not None and another[1] in choices):
        return None
    return letter


_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def search_score(response: str, ground_truth: str) -> float:
    """Score 1 if the last <answer> element is one of the expected answers, else 0.

    Answers are compared in lower case, without punctuation, articles and extra white space, as in
    SQuAD. The ground truth is JSON, a list of answers or {"target": answers}, or the answer itself.
    """
    answers = _ANSWER_TAG.findall(response)
    if not answers:
        return 0.0
    expected = {_plain_answer(target) for target in search_targets(ground_truth)}
    return float(_plain_answer(answers[-1]) in expected)


def search_targets(ground_truth: str) -> list[str]:
    """Return the expected answers that a ground truth holds; see `search_score`."""
    try:
        targets = json.loads(ground_truth)
    except ValueError:
        return [ground_truth] if ground_truth.strip() else []
    if isinstance(targets, dict):
        targets = targets.get("target")
    if not isinstance(targets, list):
        targets = [targets] if targets else []
    return [str(target) for target in targets]


def _plain_answer(answer: str) -> str:
    text = "".join(sign for sign in answer.lower() if sign not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", text).split())


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
