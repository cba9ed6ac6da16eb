r"""What a response states as its answer, and LaTeX answers in comparable form."""

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_SAID = re.compile(r"(?:the|final) answer is:?\s*(.+?)(?:\.?\s*$|\.\s|\n)", re.IGNORECASE)
_TEXT = r"\\(?:text|mathrm|mbox|textrm|textbf|mathbf|textit|operatorname)\s*\{([^{}]*)\}"
_UNWRAP = re.compile(_TEXT)
_DROPPED = ("\\left", "\\right", "\\!", "\\,", "\\;", "\\ ", "\\$", "$", " ", "\n", "\\%", "%",
            "^{\\circ}", "^\\circ", "°")  # fmt: skip


def after_thoughts(text: str) -> str:
    """Return the text after the last `</think>`, the whole text if nothing follows."""
    answer = text.rpartition("</think>")[2]
    return answer if answer.strip() else text


def find_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} or \fbox{...} that is not empty.

    None without a box, or if the last one is not closed; "" if all are empty.
    """
    if "box" not in text:
        return None
    content = None
    for box in reversed(list(_BOX.finditer(text))):
        content = _read_braces(text, box.end())
        if content is None or content.strip():
            return content
    return content


def _read_braces(text: str, start: int) -> str | None:
    """Return the text from `start` up to the brace that closes it, None if none does."""
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[start : brace.start()]
    return None


def has_matching_braces(text: str) -> bool:
    """Whether each brace of a LaTeX text is closed, and none is closed that was not open."""
    return _read_braces(text + "}", 0) == text


def find_tagged(text: str) -> str | None:
    """Return the content of the last `<answer>` element, None without one."""
    tagged = _ANSWER_TAG.findall(text)
    return str(tagged[-1]).strip() if tagged else None


def find_said(text: str) -> str | None:
    """Return what the last "the answer is" or "final answer is" says, up to its sentence's end."""
    statements = _SAID.findall(text)
    return str(statements[-1]) if statements else None


def unwrap_text(text: str) -> str:
    r"""Return LaTeX with the contents of \text{...}, \textbf{...}, ... in place of these."""
    num_replaced = text.count("\\")
    while num_replaced:  # once for each level of nesting
        text, num_replaced = _UNWRAP.subn(r"\1", text)
    return text


def normalise(text: str) -> str:
    r"""Return LaTeX without spacing, \left, \right, dollar, percent, degree signs; lower case.

    Removes full stops at the end, and a unit that `split_unit` finds. Writes \dfrac as \frac, and
    \frac12 as \frac{1}{2}.
    """
    text = split_unit(text)[0]
    for word in _DROPPED:
        text = text.replace(word, "")
    for fraction in ("\\dfrac", "\\tfrac", "\\cfrac"):
        text = text.replace(fraction, "\\frac")
    text = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", text)
    return unwrap_text(text).lower()


_UNITS = """
mm millimeter millimetre|cm centimeter centimetre|m meter metre|km kilometer kilometre
in inch inches|ft foot feet|yd yard|mi mile|mg milligram|g gram gm|kg kilogram
lb lbs pound|oz ounce|ton tonne
ms millisecond|s sec second|min minute|h hr hour|day|week|month|year yr
ml milliliter millilitre|l liter litre|gal gallon|dollar usd buck|cent|euro eur|yuan rmb
degree deg|radian rad|celsius|fahrenheit|am|pm
"""
"""Units that decide whether two answers are equal, with their spellings."""
_KNOWN_UNITS = {"mph": "mi"}
for _spellings in _UNITS.strip().replace("\n", "|").split("|"):
    _unit = _spellings.split()[0]
    _KNOWN_UNITS.update(dict.fromkeys(_spellings.split(), _unit))
MULTIPLIERS = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9,
                "trillion": 10**12}  # fmt: skip
"""Words after a number that are part of its value."""
_MERIDIEM = re.compile(r"\b([ap])\s*\.?\s*m\b\.?", re.IGNORECASE)
_POWER = r"(?: ?\^ ?(?:\{ ?-?\d ?\}|-?\d))?"
_TEXT_UNIT = re.compile(rf"(?P<bare>.*\S) ?{_TEXT}{_POWER}")
_PLAIN_UNIT = re.compile(
    rf"(?P<bare>.*[\d}}]) ?(?P<unit>[A-Za-z][A-Za-z./ ]*[A-Za-z.]){_POWER}",
)


def split_unit(text: str) -> tuple[str, str]:
    r"""Split an answer into what stands before its unit, and the unit's words; "" without a unit.

    A unit is a \text{...} at the end, unless it is the whole text, or known words after a number.
    Full stops at the end are dropped.
    """
    text = " ".join(text.split()).rstrip(". ").removesuffix("$").rstrip(". ")
    in_text = _TEXT_UNIT.fullmatch(text)
    if in_text is not None and in_text["bare"].strip("$ \\"):
        return in_text["bare"].rstrip("\\,;~ $"), in_text[2]
    plain = _PLAIN_UNIT.fullmatch(text)
    if plain is not None and any(read_unit(plain["unit"])):
        return plain["bare"].rstrip("\\,;~ "), plain["unit"]
    return text, ""


def read_unit(words: str) -> tuple[frozenset[str], int]:
    """Return the known units among words, and the product of multipliers such as "million".

    The product is 0 without a multiplier.
    """
    units: set[str] = set()
    multiplier = 0
    for word in re.findall(r"[a-z]+", _MERIDIEM.sub(r"\1m", words.lower())):
        singular = word if word in _KNOWN_UNITS else word.removesuffix("s")
        if singular in _KNOWN_UNITS:
            units.add(_KNOWN_UNITS[singular])
        elif singular in MULTIPLIERS:
            multiplier = (multiplier or 1) * MULTIPLIERS[singular]
    return frozenset(units), multiplier
