r"""Numbers in texts as exact fractions: `-$1,234.50`, `1\frac{1}{2}`, `1.5 \times 10^3`."""

import re
from fractions import Fraction
from itertools import pairwise

from mindspeed_rlxf.rewards.latex import after_thoughts, find_boxed

MAX_DIGITS = 4000  # characters of a number; longer ones are ignored
ANSWER_MARK = "####"

_DECIMAL = (
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,2}(?:,[0-9]{2})+,[0-9]{3})(?![0-9])"
    r"|[0-9]{1,3}(?:\.[0-9]{3}){2,}(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
)
# A sign (not the operator of "20-5"), a currency; then a fraction in LaTeX or with a slash, a time
# or ratio, or a decimal number, perhaps times a power of ten or with an exponent.
NUMBER = re.compile(
    rf"""
    (?P<minus>(?<![\w)])-)?[$€£¥₹]?
    (?:(?:(?P<whole>[0-9]+)\s*)?\\[cdt]?frac\s*
        (?:\{{\s*(?P<top>-?(?:{_DECIMAL}))\s*\}}|(?P<top_digit>[0-9]))\s*
        (?:\{{\s*(?P<bottom>-?(?:{_DECIMAL}))\s*\}}|(?P<bottom_digit>[0-9]))
    |(?:(?P<slash_whole>[0-9]+)\ (?=[0-9]+/))?
        (?P<slash_top>{_DECIMAL})[ ]?/[ ]?(?P<slash_bottom>{_DECIMAL})(?![0-9/])
    |(?P<hours>[0-9]+):(?P<minutes>[0-9]+)(?![0-9:])
    |(?P<digits>{_DECIMAL})
        (?:[eE](?P<e>[-+]?[0-9]{{1,4}})(?![\w.])
        |\s*(?:\\times|\\cdot|[\u00d7*x·])\s*10\s*\^\s*\{{?\s*(?P<ten>-?[0-9]{{1,4}})\s*\}}?
        |\s*\^\s*\{{?\s*(?P<power>-?[0-9]{{1,4}})\s*\}}?)?
    )""",
    re.VERBOSE,
)
_THOUSANDS = re.compile(
    r"(?<=[0-9])(?:\{,\}|\\[,;:! ],?|[\u00a0\u2009\u202f'_~])(?=[0-9]{3}(?![0-9]))"
)
_SPACED_THOUSANDS = re.compile(r"(?<=[0-9]) (?=[0-9]{3}(?![0-9/]))")
_UNIT_POWER = re.compile(
    r"(\\(?:text|mathrm|mbox|textrm)\s*\{[^{}]*\}|[A-Za-z])\s*\^\s*(?:\{\s*-?[0-9]+\s*\}|-?[0-9]+)"
)
_UNIT_DIGIT = re.compile(r"(?<![A-Za-z])([kcdm]?m|ft|in|yd|mi)[23](?![0-9A-Za-z])")
_OUT_OF = re.compile(
    r"\bout\s+of\b(?:\s+(?:the|all|a\s+total\s+of)\b)?[\s}\\,;$]*[0-9](?:[0-9,.]*[0-9])?"
)
_OVER = re.compile(r"\{\s*(-?[0-9.]+)\s*\\over\s*(-?[0-9.]+)\s*\}")
_VULGAR = {
    "½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅖": "2/5", "⅗": "3/5",
    "⅘": "4/5", "⅙": "1/6", "⅚": "5/6", "⅛": "1/8", "⅜": "3/8", "⅝": "5/8", "⅞": "7/8",
}  # fmt: skip
_WITH_VULGAR = re.compile(f"([0-9]?)([{''.join(_VULGAR)}])")
_PLAIN = str.maketrans(
    dict.fromkeys("\u2212\u2013\u2010\u2011\ufe63\uff0d", "-")
    | {chr(0xFEE0 + ord(letter)): letter for letter in "0123456789.%$:/"}  # full width
    | {"\u2044": "/", "\u2215": "/", "²": "^2", "³": "^3"}
)


def plain_numbers(text: str) -> str:
    """Write a text's numbers with ASCII signs and digits; drop exponents of units, "out of 20"."""
    if not text.isascii():
        text = _WITH_VULGAR.sub(
            lambda match: f"{match[1]} {_VULGAR[match[2]]}" if match[1] else _VULGAR[match[2]],
            text.translate(_PLAIN),
        )
    text = _THOUSANDS.sub(",", text).replace("\\$", "$").replace("$-$", "-")
    if "^" in text:
        text = _UNIT_POWER.sub(r"\1", text)
    if "out" in text:
        text = _OUT_OF.sub("", text)
    if "\\over" in text:
        text = _OVER.sub(r"\\frac{\1}{\2}", text)
    return _UNIT_DIGIT.sub(r"\1", text)


def _plain_statement(text: str) -> str:
    """Rewrite a text that is an answer alone: also `- 5`, `minus 5` and `1 234`."""
    return _SPACED_THOUSANDS.sub(",", plain_numbers(_NEGATIVE.sub("-", text)))


def _read_digits(text: str) -> Fraction | None:
    """Return the number of a text of digits alone, which most ground truths are."""
    is_number = text.isdecimal() and text.isascii() and len(text) <= MAX_DIGITS
    return Fraction(int(text)) if is_number else None


def exact_number(text: str) -> Fraction | None:
    """Return the number that a text consists of, None if it has anything else."""
    if len(text) > MAX_DIGITS:
        return None
    match = NUMBER.fullmatch(_plain_statement(text.strip()))
    return None if match is None or match["hours"] else _value(match)


def find_numbers(text: str) -> list[Fraction]:
    """List all numbers in a text, in order, as exact fractions."""
    numbers = []
    for match in NUMBER.finditer(plain_numbers(text)):
        number = _value(match)
        if number is not None:
            numbers.append(number)
    return numbers


def _value(match: re.Match[str]) -> Fraction | None:
    """Return a number's value; None if it has too many digits or divides by 0."""
    if len(match[0]) > MAX_DIGITS:
        return None
    try:
        if match["digits"]:
            value = _decimal_value(match)
        elif match["hours"]:
            value = _time_or_ratio(match["hours"], match["minutes"])
        else:
            top = _fraction(match["top"] or match["top_digit"] or match["slash_top"])
            bottom = _fraction(match["bottom"] or match["bottom_digit"] or match["slash_bottom"])
            value = int(match["whole"] or match["slash_whole"] or 0) + top / bottom
    except (ZeroDivisionError, OverflowError):
        return None
    return -value if match["minus"] else value


def _fraction(digits: str) -> Fraction:
    if digits.count(".") > 1:  # 1.234.567
        digits = digits.replace(".", "")
    return Fraction(digits.replace(",", ""))


def _decimal_value(match: re.Match[str]) -> Fraction:
    value = _fraction(match["digits"])
    if match["power"]:
        power = int(match["power"])
        if len(match["digits"]) * abs(power) > MAX_DIGITS:
            raise OverflowError
        return Fraction(value**power)
    exponent = int(match["e"] or match["ten"] or 0)
    if abs(exponent) > MAX_DIGITS:
        raise OverflowError
    return Fraction(value * Fraction(10) ** exponent)


def _time_or_ratio(left: str, right: str) -> Fraction:
    """Return the hours of a time of day or duration, else the quotient of a ratio."""
    if len(right) == 2 and int(right) < 60 and len(left) <= 2:
        return int(left) + Fraction(int(right), 60)
    return Fraction(int(left), int(right))


def last_number(text: str) -> Fraction | None:
    """Return the last number in a text, None without one."""
    for line in reversed(text.split("\n")):
        numbers = find_numbers(line)
        if numbers:
            return numbers[-1]
    return None


_SIDES = re.compile(r"=|\\approx|≈|\\equiv")
_LIST = re.compile(r",(?![0-9]{3})|;|\b(?:or|and)\b")
_OPERATOR = r"(?:[-+*/^÷\u00d7·]|\\times|\\cdot|\\div|\\pm)"
# Between two numbers that are both an answer, or terms of an expression.
_JOINS = re.compile(
    rf"[\s$(){{}}\[\]]*(?:{_OPERATOR}[\s$(){{}}\[\]\\]*)?|.*(?:[,;]|\b(?:or|and)\b).*", re.DOTALL
)
_DECORATION = r"[\s*_`$:=~>(\[{]|\\[(\[]|\\(?:text|mathrm|mathbf|textbf)\s*\{"
_LEADING = re.compile(rf"(?:{_DECORATION}|[A-Za-z]\s*=)*")
_NEGATIVE = re.compile(r"^\s*-\s+(?=[0-9$\\])|\b(?i:minus|negative)\s+(?=\$?[0-9])")


def stated_number(text: str) -> Fraction | None:
    r"""Return the number that a short text, such as a box, gives as its answer.

    `x = 18` and `18 = 3 \times 6` give 18, `18 \text{ m}^2` too. None without a number, and for
    several answers (`17 or 18`) and for expressions (`16 - 7`).
    """
    text = _plain_statement(text)
    sides = _SIDES.split(text)
    if any(_LIST.search(side) for side in sides[1:-1]):  # x = 3 and y = 18
        return None
    if len(sides) > 1:
        for side in (sides[-1], sides[0]):
            matches = list(NUMBER.finditer(side))
            if len(matches) == 1:
                return _value(matches[0])
    matches = list(NUMBER.finditer(text))
    if not matches:
        return None
    for left, right in pairwise(matches):
        if _JOINS.fullmatch(text[left.end() : right.start()]):
            return None
    begins = _LEADING.match(text)
    is_first = begins is not None and begins.end() >= matches[0].start()
    return _value(matches[0] if is_first else matches[-1])


_LABEL = re.compile(
    r"[\s*_`]*(?i:(?:so|thus|hence|therefore),?\s+)?(?i:the\s+)?(?i:(?:final|correct|numerical)\s+)?"
    r"(?i:answer|result)\b[\s*_`]*(?i:is\b)?[\s*_`:=]*"
)
_NUMBERED = re.compile(r"[\s*_`]*([0-9]{1,2})[.):][\s*_`]+[^\W\d]")
_ASIDE = re.compile(r"[;(]|,(?![0-9])|\.(?=\s|$)|\b(?:because|since|as|so)\b")
_TERM = re.compile(rf"\s*{_OPERATOR}\s*[0-9(\\$]")


def marked_number(text: str) -> Fraction | None:
    """Return the number after the first `####` that a number follows, None without one.

    A Markdown heading, such as `#### Step 1: Count` or `#### 1. Count`, is not followed by one;
    `#### Answer: 18` is.
    """
    if ANSWER_MARK not in text:
        return None
    num_headings = 0  # numbered ones
    for section in after_thoughts(text).split(ANSWER_MARK)[1:]:
        line, _, rest = section.lstrip("# \t\n\r").partition("\n")
        label = None if line[:1].isdecimal() else _LABEL.match(line)
        if label is not None:
            line = line[label.end() :].strip() or rest.lstrip().partition("\n")[0]
        heading = _NUMBERED.match(line)
        if heading is not None and int(heading[1]) == num_headings + 1:
            num_headings += 1
            continue
        number = _read_digits(line.strip())
        if number is None:
            number = _leading_number(line)
        if number is not None:
            return number
    return None


def _leading_number(line: str) -> Fraction | None:
    """Return the number that a line begins with, the result if it is an equation's left side."""
    boxed = find_boxed(line)
    if boxed is not None:
        return stated_number(boxed)
    line = _plain_statement(line)
    begins = _LEADING.match(line)
    line = line[begins.end() :] if begins else line
    number = NUMBER.match(line)
    if number is None:
        return None
    statement = line[: number.end()] + _ASIDE.split(line[number.end() :], maxsplit=1)[0]
    if _SIDES.search(statement):
        return stated_number(statement)
    return None if _TERM.match(statement, number.end()) else _value(number)


def boxed_number(text: str) -> Fraction | None:
    r"""Return the number in the last `\boxed{...}`; None without a single number or a box."""
    return stated_number(find_boxed(text) or "")


def final_number(text: str) -> Fraction | None:
    """Return the number after `####`, else in the last box, else the last number.

    A box with several numbers is an answer too, a wrong one: None.
    """
    number = _read_digits(text)
    if number is not None:
        return number
    text = after_thoughts(text)
    if ANSWER_MARK in text:
        number = marked_number(text)
        if number is not None:
            return number
    boxed = find_boxed(text)
    if boxed is not None and NUMBER.search(plain_numbers(boxed)):
        return stated_number(boxed)
    return last_number(text)
