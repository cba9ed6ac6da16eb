r"""Answers of mathematics: read, and compared as numbers, times, texts or expressions."""

import logging
import math
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from mindspeed_rlxf.rewards.latex import (
    after_thoughts,
    find_boxed,
    find_said,
    find_tagged,
    has_matching_braces,
    normalise,
    read_unit,
    split_unit,
    unwrap_text,
)
from mindspeed_rlxf.rewards.numbers import exact_number

NUM_CACHED = 256  # answers: those of a prompt's responses are often the same
_TIME = re.compile(r"(\d{1,2}):([0-5]\d)")
_RATIO = re.compile(r"\d{1,9}(?::\d{1,9}){2,}")
_PERCENT = re.compile(r"(?<=[\w}\s])\s*(?:\\?%|\bpercent|\bpct)")
_PERCENT_NUMBER = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(?:\\?%|percent\b|pct\b)")
_FORMULA = re.compile(r"\$([^$]+)\$|\\\((.+?)\\\)")
_PLAIN_WORD = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{2,}")
_PHRASE = re.compile(r"[^\W\d_][\w\s.,'\u2019-]*")
_VALUED = re.compile(
    r"[0-9][0-9.,:]*\s*(?:[ap]\.?\s?m\b|hundred|thousand|[mbtr]+illion)|[0-9]{1,2}:[0-5][0-9]",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Answer:
    r"""An answer, read as far as this works without an algebra system.

    Attributes:
        text: Normal form, such as `\frac{1}{2}x`.
        bare: The answer as given, without unit and percent sign.
        number: Exact value with `million` and the like, 50 for 50%; None if it is no number.
        is_decimal: Whether the number has a decimal point.
        is_percent: Whether a percent sign ends it.
        time: Minutes after midnight for a time such as 12:00 or 7 p.m., else None.
        multiplier: Of words such as `million`, 0 without one.
        word: Letters in lower case if it is a text (`Evelyn`, `CAN`), else "".
        units: Known units, such as {"cm"} or {"pm"}.
    """

    text: str
    bare: str
    number: Fraction | None
    is_decimal: bool
    is_percent: bool
    time: int | None
    multiplier: int
    word: str
    units: frozenset[str]


@lru_cache(NUM_CACHED)
def read_answer(text: str) -> Answer:
    """Read an answer that stands alone, such as the content of a box."""
    bare, unit = split_unit(text.replace("\\left", "").replace("\\right", ""))
    units, multiplier = read_unit(unit)
    percent = _PERCENT.search(bare)
    is_percent = percent is not None and percent.end() == len(bare)
    if percent is not None and is_percent:
        bare = bare[: percent.start()]
    if bare.startswith("\\$"):
        units |= {"dollar"}
    if bare.endswith(("^\\circ", "^{\\circ}", "°")):
        units |= {"degree"}
    bare = bare.strip("$ ")
    plain = unwrap_text(bare)
    number = exact_number(plain)
    if number is not None:
        number *= multiplier or 1
    return Answer(
        text=normalise(text),
        bare=bare,
        number=number,
        is_decimal="." in plain,
        is_percent=is_percent,
        time=_read_time(plain, number, units),
        multiplier=multiplier,
        word=_read_word(bare),
        units=units,
    )


def _read_time(plain: str, number: Fraction | None, units: frozenset[str]) -> int | None:
    is_half = not units.isdisjoint({"am", "pm"})
    clock = _TIME.fullmatch(plain)
    if clock is not None:
        hour = int(clock[1])
        minute = int(clock[2])
    elif is_half and number is not None and number.denominator == 1:
        hour = int(number)
        minute = 0
    else:
        return None
    if is_half:
        hour = hour % 12 + 12 * ("pm" in units)
    return 60 * hour + minute


def _read_word(bare: str) -> str:
    r"""Return the letters of a text; "" for a product of letters (`x`, `ab`) and for LaTeX.

    Letters in \text{} are a text; so are three or more, or two capital ones, without it.
    """
    plain = unwrap_text(bare).strip("() ")
    if not _PHRASE.fullmatch(plain):
        return ""
    words = re.findall(r"\w+", plain)
    is_text = plain != bare.strip("() ") or max(map(len, words)) > 2 or plain.isupper()
    is_product = len(plain) == 1 or (len(words) == len(plain.split()) and max(map(len, words)) < 2)
    return " ".join(words).lower() if is_text and not is_product else ""


def _letters(answer: Answer) -> str:
    return " ".join(re.findall(r"\w+", unwrap_text(answer.bare))).lower()


def is_same(answer: Answer, truth: Answer) -> bool | None:
    """Whether two answers are equal, None if only an algebra system can tell.

    Units decide only if both have known ones that differ.
    """
    if answer.units - truth.units and truth.units - answer.units:
        return _is_same_time(answer, truth)
    if truth.time is not None and answer.time is not None:
        return _is_same_time(answer, truth)
    if answer.number is not None and truth.number is not None:
        return _is_same_number(answer, truth)
    if truth.word:
        return _letters(answer) == truth.word
    if _RATIO.fullmatch(truth.text):
        return _is_same_ratio(answer.text, truth.text)
    if answer.text and answer.text == truth.text:
        return True
    return None if answer.text and truth.text else False


def _is_same_time(answer: Answer, truth: Answer) -> bool:
    if answer.time is None or truth.time is None:
        return False
    if answer.time == truth.time:
        return True
    knows_half = _says_half_of_day(answer)
    return knows_half != _says_half_of_day(truth) and answer.text == truth.text


def _says_half_of_day(answer: Answer) -> bool:
    return not answer.units.isdisjoint({"am", "pm"})


def _is_same_number(answer: Answer, truth: Answer) -> bool:
    """Compare exactly; also a percentage with its fraction, and six decimals with a fraction."""
    assert answer.number is not None and truth.number is not None
    if answer.number == truth.number:
        return True
    if answer.is_percent != truth.is_percent:
        if answer.is_percent:
            return answer.number / 100 == truth.number
        return truth.number / 100 == answer.number
    if answer.is_decimal == truth.is_decimal:
        return False
    exact, decimal = sorted((answer.number, truth.number), key=_has_decimals)
    if _has_decimals(exact):
        return False
    is_near = abs(exact - decimal) <= abs(exact) / 10**5
    return is_near and round(exact, 6) == round(decimal, 6)


def _is_same_ratio(answer: str, truth: str) -> bool:
    """Compare ratios of three or more integers, which math-verify divides one by the other."""
    if not _RATIO.fullmatch(answer):
        return False
    return _reduce_ratio(answer) == _reduce_ratio(truth)


def _reduce_ratio(text: str) -> list[int]:
    """Return the terms of a ratio such as `2:4:6`, divided by what they have in common."""
    terms = [int(term) for term in text.split(":")]
    divisor = math.gcd(*terms) or 1
    return [term // divisor for term in terms]


def _has_decimals(number: Fraction) -> bool:
    """Whether a number can be written with finitely many decimals."""
    rest = number.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


def math_score(response: str, ground_truth: str) -> float:
    r"""Score 1 if the response's answer equals the ground truth, else 0.

    The answer is the last \boxed{} or \fbox{}, else the last `<answer>` element, else what the
    prose says. The ground truth is LaTeX, or a solution with the answer in its last box.

    Numbers, times and texts are compared here (`is_same`), other expressions by math-verify. That
    may run without bound: its own timeouts are off, because they are signals, and signals work only
    in main threads. So the rule runs in processes with a deadline.
    """
    truth = _read_truth(ground_truth)
    text = after_thoughts(response)
    stated = find_boxed(text)
    if stated is not None:
        return float(_is_equal(stated, truth) or False)
    tagged = find_tagged(text)
    is_tagged = None if tagged is None else _is_equal(tagged, truth)
    if is_tagged is not None:
        return float(is_tagged)
    return float(_prose_says(tagged or text, truth))


def _read_truth(ground_truth: str) -> Answer:
    boxed = find_boxed(ground_truth)
    return read_answer(ground_truth if boxed is None else boxed)


def accepts_math_truth(ground_truth: str) -> bool:
    """Whether some response of `math` can equal a ground truth.

    Raises:
        ValueError: None can, for this reason.
    """
    truth = _read_truth(ground_truth)
    if not has_matching_braces(truth.bare):
        raise ValueError("the braces of its LaTeX do not match")
    return bool(truth.text)


def needs_parser(ground_truth: str) -> bool:
    """Whether a ground truth of `math` is more than a number, a time or a text."""
    truth = _read_truth(ground_truth)
    return truth.number is None and truth.time is None and not truth.word


def can_parse(ground_truth: str) -> bool:
    """Whether math-verify reads a ground truth as an expression that it can compare."""
    import sympy

    parsed = _parse_boxed(_read_truth(ground_truth).bare)
    for expression in parsed:
        if not isinstance(expression, str) and expression not in (sympy.zoo, sympy.nan):
            return True
    return False


def _is_equal(stated: str, truth: Answer) -> bool | None:
    """Whether an answer that stands alone is the truth, None if it is no expression."""
    answer = read_answer(stated)
    is_known = is_same(answer, truth)
    if is_known is not None:
        return is_known
    expected = _parse_boxed(truth.bare)
    parsed = _parse_boxed(answer.bare)
    if _verify(expected, parsed):
        return True
    if all(isinstance(expression, str) for expression in parsed):
        return None
    if answer.is_percent == truth.is_percent:
        return False
    if answer.is_percent:
        return _verify(expected, _parse_boxed(f"\\frac{{{answer.bare}}}{{100}}"))
    return _verify(_parse_boxed(f"\\frac{{{truth.bare}}}{{100}}"), parsed)


def _prose_says(text: str, truth: Answer) -> bool:
    """Whether a response without a box states the truth."""
    statement = find_said(text)
    is_said = None if statement is None else _says(statement, truth)
    if is_said is not None:
        return is_said
    if truth.word:
        return False
    if truth.time is not None or truth.multiplier:
        valued = _VALUED.findall(text)
        return bool(valued) and is_same(read_answer(valued[-1]), truth) is True
    without = _PERCENT_NUMBER.sub(r"\1", text)
    if _verify(_parse_boxed(truth.bare), _parse(without)):
        return True
    if without == text and not truth.is_percent:
        return False
    fractions = _PERCENT_NUMBER.sub(lambda m: f"{float(Fraction(m[1]) / 100):.15g}", text)
    bare = f"\\frac{{{truth.bare}}}{{100}}" if truth.is_percent else truth.bare
    return _verify(_parse_boxed(bare), _parse(fractions))


def _says(statement: str, truth: Answer) -> bool | None:
    """Whether what follows "the answer is" is the truth, None if a sentence goes on there."""
    is_known = is_same(read_answer(statement), truth)
    if is_known is not None:
        return is_known
    formula = _FORMULA.search(statement)
    if formula is not None:
        return _is_equal(formula[1] or formula[2], truth)
    return None if _PLAIN_WORD.search(statement) else _is_equal(statement, truth)


@lru_cache(NUM_CACHED)
def _parse_boxed(answer: str) -> list[Any]:
    return _parse(f"\\boxed{{{answer}}}")


def _parse(text: str) -> list[Any]:
    """Return math-verify's expressions of a text; [] if it fails on it."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of time-outs that are off
    try:
        return list(math_verify.parse(text, parsing_timeout=None, raise_on_error=True))
    except MemoryError:
        raise
    except Exception:  # any, of sympy and ANTLR: the text is no expression
        return []


def _verify(expected: list[Any], parsed: list[Any]) -> bool:
    """Whether math-verify finds two parsed texts equal, and numbers in them are.

    It rounds numbers to 15 decimals, so that it takes all small ones for equal.
    """
    import math_verify

    if not expected or not parsed:
        return False
    try:
        if not math_verify.verify(expected, parsed, timeout_seconds=None, raise_on_error=True):
            return False
        return not _differ(expected[0], parsed[0])
    except MemoryError:
        raise
    except Exception:  # any, of sympy: 12:0 and 1/0 cannot be compared, so they are not equal
        return False


def _differ(left: Any, right: Any) -> bool:
    """Whether two expressions have different numbers at the same position."""
    import sympy

    if isinstance(left, str) or isinstance(right, str):
        return False
    if isinstance(left, sympy.Eq):
        left = left.rhs
    if isinstance(right, sympy.Eq):
        right = right.rhs
    containers = sympy.Tuple, sympy.FiniteSet, sympy.Interval
    if isinstance(left, containers) and isinstance(right, containers):
        if len(left.args) != len(right.args):
            return False
        left_terms = list(left.args)
        right_terms = list(right.args)
        if isinstance(left, sympy.FiniteSet) and isinstance(right, sympy.FiniteSet):
            left_terms.sort(key=lambda term: term.evalf().sort_key())
            right_terms.sort(key=lambda term: term.evalf().sort_key())
        return any(map(_differ, left_terms, right_terms))
    if not isinstance(left, sympy.Expr) or not isinstance(right, sympy.Expr):
        return False
    if not left.is_number or not right.is_number:
        return False
    left = left.doit()
    right = right.doit()
    if (left.is_Rational and right.is_Rational) or (left.is_Float and right.is_Float):
        return bool(left != right)
    tolerance = 1e-5 if left.has(sympy.Float) or right.has(sympy.Float) else 1e-12
    left = sympy.N(left, 30)
    right = sympy.N(right, 30)
    return bool(abs(left - right) > tolerance * max(abs(left), abs(right)))
