"""Find the answer in each response, for majority votes over the responses to a prompt (maj@k).

Two responses vote for the same answer where these texts are equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import partial

from mindspeed_rlxf.config.enums import Verifier
from mindspeed_rlxf.rewards.answers import (
    CHOICES,
    final_number,
    find_boxed,
    find_choice,
    last_number,
    marked_number,
)
from mindspeed_rlxf.rewards.rules import BUILTIN_SOURCES
from mindspeed_rlxf.rewards.verifiers import find_answer, normalise, to_number

LONGEST = 120  # characters of an answer; the end of a longer one is replaced by a hash
Extract = Callable[[str], str | None]


def _as_text(find: Callable[[str], Fraction | None], response: str) -> str | None:
    number = find(response)
    return None if number is None else str(number)


def whole_text(response: str) -> str:
    """Return the whole response in lower case, with white space as single spaces."""
    return " ".join(response.split()).casefold()


def boxed_answer(response: str) -> str | None:
    """Return the last boxed answer, a number by value, else `normalise`d; None without a box."""
    answer = find_boxed(response)
    return None if answer is None else _normalise_answer(answer)


def final_answer(response: str) -> str | None:
    """Return the boxed or stated answer, else the last number, normalised, as `base_acc` reads it.

    "" without any.
    """
    return _normalise_answer(find_answer(response))


def _normalise_answer(answer: str) -> str:
    """Return a number by its value (0.5 and 1/2 give "1/2"), other answers after `normalise`."""
    text = normalise(answer)
    number = to_number(text)
    return text if number is None else str(number)


OF_RULES: dict[str, Extract] = {
    "exact_match": str.strip,
    "gsm8k": partial(_as_text, final_number),
    "gsm8k_strict": partial(_as_text, marked_number),
    "gsm8k_flexible": partial(_as_text, last_number),
    "math": final_answer,
    "multiple_choice": partial(find_choice, choices=CHOICES),
}
"""Name of a rule -> function that finds the answer it reads; `whole_text` for other rules."""
OF_VERIFIERS: dict[Verifier, Extract] = {
    Verifier.ACC: boxed_answer,
    Verifier.BASE_ACC: final_answer,
}


class AnswerFinder:
    """Finds answers as the rule of the response's data source reads them."""

    def __init__(
        self, rules: Mapping[str, str], verifiers: Sequence[tuple[Verifier, float]] = ()
    ) -> None:
        """Choose by rule for each data source, or by the first verifier that compares answers.

        Rules and verifiers without a function take the whole text as the answer.
        """
        table = BUILTIN_SOURCES | dict(rules)
        self._by_source = {source: OF_RULES.get(rule, whole_text) for source, rule in table.items()}
        comparing = [OF_VERIFIERS[rule] for rule, _ in verifiers if rule in OF_VERIFIERS]
        self._for_all = (comparing or [whole_text])[0] if verifiers else None

    def find(self, responses: Sequence[str], data_sources: Sequence[str]) -> list[str | None]:
        """Return each response's answer, None without one; a hash ends those over LONGEST."""
        found: list[str | None] = []
        for response, source in zip(responses, data_sources, strict=True):
            extract = self._for_all or self._by_source.get(source, whole_text)
            answer = extract(response) or None
            if answer and len(answer) > LONGEST:
                digest = hashlib.sha256(answer.encode("utf-8", "surrogatepass")).hexdigest()[:16]
                answer = f"{answer[: LONGEST - len(digest) - 3]}...{digest}"
            found.append(answer)
        return found
