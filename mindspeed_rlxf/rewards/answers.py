"""Find the answer in each response, by which responses to a prompt vote (maj@k).

Two responses have the same answer where these texts are equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

from mindspeed_rlxf.config.enums import Verifier
from mindspeed_rlxf.rewards.rules import (
    BUILTIN_RULES,
    RULES,
    Rule,
    exact_match,
    final_number,
    gsm8k,
)
from mindspeed_rlxf.rewards.verifiers import find_answer, find_boxed, normalise, to_number

LONGEST = 120  # characters of an answer; of a longer one a hash takes the place of the end
Extract = Callable[[str], str | None]


def answer_with_number(response: str) -> str | None:
    """Return the number that the rule `gsm8k` compares: 1,000 = 1000.0 = $1000."""
    number = final_number(response)
    if number is None:
        return None
    text = format(number, "f")
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def whole_text(response: str) -> str:
    """Return the text in lower case, with single spaces."""
    return " ".join(response.split()).casefold()


def boxed_answer(response: str) -> str | None:
    """Return the answer that the verifier `acc` compares."""
    answer = find_boxed(response)
    return None if answer is None else _normalised(answer)


def final_answer(response: str) -> str | None:
    """Return the answer that the verifier `base_acc` compares."""
    return _normalised(find_answer(response))


def _normalised(answer: str) -> str:
    """Numbers by value (1/2 = 0.5), other answers as LaTeX without spacing."""
    text = normalise(answer)
    number = to_number(text)
    return text if number is None else str(number)


OF_RULES: dict[Rule, Extract] = {gsm8k: answer_with_number, exact_match: str.strip}
"""Answers of rules; those of other rules are the whole text."""
OF_VERIFIERS: dict[Verifier, Extract] = {
    Verifier.ACC: boxed_answer,
    Verifier.BASE_ACC: final_answer,
}


class AnswerFinder:
    """Finds answers as the rule of the response's data source reads them."""

    def __init__(
        self, rules: Mapping[str, str], verifiers: Sequence[tuple[Verifier, float]] = ()
    ) -> None:
        """As of `RewardManager`: rules by data source; verifiers, which take their place."""
        named = {source: RULES[name] for source, name in rules.items() if name in RULES}
        table = {**BUILTIN_RULES, **named}
        self._by_source = {source: OF_RULES.get(rule, whole_text) for source, rule in table.items()}
        comparing = [OF_VERIFIERS[rule] for rule, _ in verifiers if rule in OF_VERIFIERS]
        self._for_all = (comparing or [whole_text])[0] if verifiers else None

    def find(self, responses: Sequence[str], data_sources: Sequence[str]) -> list[str | None]:
        """Return the answer of each response, at most LONGEST characters; None without one."""
        rows = zip(responses, data_sources, strict=True)
        return [self._find_one(response, source) for response, source in rows]

    def _find_one(self, response: str, source: str) -> str | None:
        extract = self._for_all or self._by_source.get(source, whole_text)
        answer = extract(response)
        if not answer or len(answer) <= LONGEST:
            return answer or None
        digest = hashlib.sha256(answer.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        return f"{answer[: LONGEST - len(digest) - 3]}...{digest}"
