r"""The rules that verl applies to GSM8K, MATH and DAPO's data, with its scores.

They compare texts, so they are stricter than `gsm8k` and `math`: `18.` is not `18`, `4.0` not `4`.
MATH's answers are normalised as in arXiv:2103.03874, DAPO's as in arXiv:2206.14858.
"""

import re

GSM8K_TAIL = 300
"""Characters at the end of a response in which verl looks for the answer."""

_MARKED = re.compile(r"#### (-?[0-9.,]+)")
_NUMERIC = re.compile(r"-?[0-9.,]+")


def gsm8k_verl_answer(response: str, method: str = "strict") -> str | None:
    """Return what verl's rule for GSM8K takes as a response's answer, None without one.

    Args:
        response: Only its last 300 characters are read.
        method: `strict` = after the last `#### `, without commas; `flexible` = the last number,
            with its commas and full stops.

    Raises:
        ValueError: The method is another one.
    """
    tail = response[-GSM8K_TAIL:]
    if method == "strict":
        marked = _MARKED.findall(tail)
        return marked[-1].replace(",", "") if marked else None
    if method == "flexible":
        numbers = [number for number in _NUMERIC.findall(tail) if number != "."]
        return numbers[-1] if numbers else None
    raise ValueError(f"method={method!r} must be strict or flexible")


def gsm8k_verl(response: str, ground_truth: str, method: str = "strict") -> float:
    """Score 1 if verl's answer (`gsm8k_verl_answer`) is the text of the ground truth, else 0."""
    return float(gsm8k_verl_answer(response, method) == ground_truth)


def accepts_gsm8k_truth(ground_truth: str) -> bool:
    """Whether some response of `gsm8k_verl` can equal a ground truth.

    Raises:
        ValueError: None can, for this reason.
    """
    if not re.fullmatch(r"-?[0-9.]+", ground_truth):
        raise ValueError("it must be digits alone, as 1234 for 1,234")
    return True


def accepts_math_truth(ground_truth: str) -> bool:
    """Whether some response of `math_verl` can equal a ground truth."""
    return bool(ground_truth) and math_verl(f"\\boxed{{{ground_truth}}}", ground_truth) > 0


def math_verl(response: str, ground_truth: str) -> float:
    r"""Score 1 if the last \boxed{} is the ground truth after verl's normalisation, else 0."""
    answer = math_verl_answer(response)
    return float(answer is not None and _is_same(answer, ground_truth))


def math_verl_answer(response: str) -> str | None:
    r"""Return the content of the last \boxed{}, None without a closed one.

    As in verl, a `\boxed ` with a space anywhere comes first, and takes the text up to a dollar.
    """
    if "\\boxed " in response:
        return response.rpartition("\\boxed ")[2].partition("$")[0]
    start = response.rfind("\\boxed")
    if start < 0 or not response.startswith("\\boxed{", start):
        return None
    return _read_box(response[start:])


def _read_box(text: str) -> str | None:
    """Return what is between the braces of the box with which a text begins; None if it is open."""
    depth = 0
    for brace in re.finditer("[{}]", text):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[len("\\boxed{") : brace.start()]
    return None


# Characters at the end of a response in which verl looks for DAPO's answer, and for its box.
DAPO_TAIL = 300
DAPO_BOX_TAIL = 100

_STATED = re.compile(r"(?i)answer\s*:\s*([^\n]+)")


def math_dapo_verl(response: str, ground_truth: str) -> tuple[bool, str | None]:
    r"""Return whether verl's rule for `math_dapo` and AIME finds a response right, and its answer.

    The answer is the text after the last `Answer:`, which is normalised as the ground truth is;
    without one the last \boxed{}, which must be equal to it (in verl since August 2026).
    """
    answer = math_dapo_answer(response)
    if _STATED.search(response[-DAPO_TAIL:]):
        return answer == _normalise_dapo(ground_truth), answer
    return answer == ground_truth, answer


def math_dapo_answer(response: str) -> str | None:
    """Return what verl's rule for `math_dapo` takes as a response's answer, None without one."""
    stated = _STATED.findall(response[-DAPO_TAIL:])
    if stated:
        return _normalise_dapo(stated[-1])
    tail = response[-DAPO_BOX_TAIL:]
    start = tail.rfind("\\boxed{")
    return None if start < 0 else _read_box(tail[start:])


def accepts_math_dapo_truth(ground_truth: str) -> bool:
    """Whether some response of `math_dapo_verl` can equal a ground truth."""
    return math_dapo_verl(f"Answer: {ground_truth}", ground_truth)[0]


# Appendix D.1 of arXiv:2206.14858: what is replaced, then what is dropped.
_REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"),
    (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
_WORDS = r"""
square ways integers dollars mph inches hours km units \ldots sue points feet minutes digits cents
degrees cm gm pounds meters meals edges students childrentickets multiples \text{s} \text{.}
"""
_SIGNS = r"""\text{} \mathrm{th} ^\circ ^{\circ} \; ,\! {,} " \dots"""
_BREAKS = "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}"
_DROPPED = (*_WORDS.split(), *_BREAKS, *_SIGNS.split())


def _normalise_dapo(text: str) -> str:
    text = text.rpartition("=")[2]
    for old, new in _REPLACED:
        text = text.replace(old, new)
    for dropped in _DROPPED:
        text = text.replace(dropped, "")
    text = re.sub(r".*?\$(.*?)\$.*", r"$\1$", text)
    for command in ("text", "textbf", "overline"):
        text = re.sub(rf"\\{command}{{(.*?)}}", r"\1", text)
    text = re.sub(r"\\boxed{(.*)}", r"\1", text)
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)
    text = re.sub(r"sqrt([^{])", r"sqrt{\1}", text).replace("$", "")
    digits = text.replace(",", "")
    return digits if digits.isdigit() else text.strip()


def _is_same(answer: str, ground_truth: str) -> bool:
    try:
        return _normalise(answer) == _normalise(ground_truth)
    except ValueError:
        return answer == ground_truth


def _normalise(text: str) -> str:
    """Return MATH's normal form of an answer. Raises ValueError where verl compares as it is."""
    text = text.replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    text = text.replace("tfrac", "frac").replace("dfrac", "frac")
    for dropped in ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$"):
        text = text.replace(dropped, "")
    text, *unit = text.split("\\text{ ")
    if len(unit) > 1:
        raise ValueError("two units")
    text = text.replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if text.startswith("."):
        text = f"0{text}"
    sides = text.split("=")
    if len(sides) == 2 and len(sides[0]) <= 2:  # x = 5
        text = sides[1]
    if re.search(r"\\sqrt(?=\\sqrt|$)", text):
        raise ValueError("a root of nothing")
    text = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", text).replace(" ", "")
    text = _brace_fractions(text)
    if text == "0.5":
        return "\\frac{1}{2}"
    slash = re.fullmatch(r"(0|-?[1-9][0-9]*)/(0|-?[1-9][0-9]*)", text)
    return text if slash is None else f"\\frac{{{slash[1]}}}{{{slash[2]}}}"


def _brace_fractions(text: str) -> str:
    r"""Write \frac12 as \frac{1}{2}."""
    written, *fractions = text.split("\\frac")
    for fraction in fractions:
        if not fraction:
            raise ValueError("a fraction of nothing")
        if fraction[0] != "{":
            if len(fraction) == 1:
                return text
            top = fraction[0]
            bottom = fraction[1]
            rest = fraction[2:]
            if bottom != "{":
                bottom = f"{{{bottom}}}"
            fraction = f"{{{top}}}{bottom}{rest}"
        written += f"\\frac{fraction}"
    return written
