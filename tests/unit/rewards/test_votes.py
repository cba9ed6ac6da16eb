"""Responses vote for the same answer where their rule takes the answers for equal."""

from typing import Any

import pytest

from mindspeed_rlxf.config.enums import Verifier
from mindspeed_rlxf.rewards.verifiers import LONGEST, AnswerFinder


def one(response: str, source: str = "gsm8k", **more: Any) -> str | None:
    return AnswerFinder({"mine": "gsm8k"}, **more).find([response], [source])[0]


@pytest.mark.parametrize(
    ("source", "response", "answer"),
    [
        ("gsm8k", "so 3 + 4 #### 1,000.", "1000"),
        ("gsm8k", "that is $1000.00", "1000"),
        ("gsm8k", "0 or -0.0", "0"),
        ("gsm8k", "-.50", "-1/2"),
        ("Rowan/hellaswag", "I take (B).", "B"),
        ("hendrycks/competition_math", r"so \boxed{0.50}", "1/2"),
        ("gsm8k", "no number", None),
        ("mine", "twelve, 12", "12"),  # reward.rules
        ("arithmetic", "  Five \n", "Five"),  # exact_match
        ("arithmetic", " ", None),
        ("of a user", "The  ANSWER\nis x", "the answer is x"),
    ],
)
def test_an_answer_is_what_the_rule_compares(source: str, response: str, answer: str) -> None:
    assert one(response, source) == answer


def test_answers_for_votes_come_from_the_verifiers_if_there_are_some() -> None:
    boxed = r"so \boxed{\frac{1}{2}}, not 3"
    assert one(boxed, verifiers=[(Verifier.FORMAT, 1.0), (Verifier.ACC, 1.0)]) == "1/2"
    assert one("so 0.5", verifiers=[(Verifier.BASE_ACC, 1.0)]) == "1/2"
    assert one("so 0.5", verifiers=[(Verifier.ACC, 1.0)]) is None
    assert one(r"\boxed{X}", verifiers=[(Verifier.ACC, 1.0)]) == "x"
    assert one("Step 1:  go", verifiers=[(Verifier.STEP, 1.0)]) == "step 1: go"


def test_a_long_answer_is_bounded_and_still_its_own() -> None:
    found = [one("a" * 5000 + end, "of a user") for end in ("b", "b", "c")]
    assert found[0] == found[1] != found[2]
    assert all(answer is not None and len(answer) == LONGEST for answer in found)
    assert one("7" * 3999) is not None and one("7" * 5000) is None, "no number is so long"
