"""Word problems with a calculator: questions, and the agent that computes what the model writes.

A question takes a product and then a sum or a difference, of numbers from 11 to 99. Two examples in
the prompt show how to call:

    calc: 34 * 12 = 408
    calc: 408 - 58 = 350
    There are 350 pens left.

The model's turn ends at `=`. The agent continues it by the result, which is not trained. Another
form of questions, which no example shows, takes a sum and a difference: three calls.
`make_data.py` writes both.
"""

from __future__ import annotations

import random
import re
from typing import Any

from mindspeed_rlxf.agents.session import Session, register_agent
from mindspeed_rlxf.rollout.rollout_engine import FinishReason

NUM_TRAIN, NUM_TEST = 1024, 64
LOWEST, LARGEST = 11, 99
CALL = re.compile(r"calc:\s*(\d{1,7})\s*([*+-])\s*(\d{1,7})\s*=$")
NUMBER = re.compile(r"\d+")
NAMES = ("Tom", "Anna", "Ben", "Eva", "Sam")
THINGS = ("apples", "books", "coins", "cards")
TWO_CALLS, THREE_CALLS = "calculator", "three_calls"  # data sources
EXAMPLES = [
    (
        "There are 34 boxes with 12 pens each. 58 pens are sold. How many pens are left?",
        "calc: 34 * 12 = 408\ncalc: 408 - 58 = 350\nThere are 350 pens left.",
    ),
    (
        "Kim buys 56 bags with 23 nuts each, and 17 more nuts. How many nuts does Kim have?",
        "calc: 56 * 23 = 1288\ncalc: 1288 + 17 = 1305\nKim has 1305 nuts.",
    ),
]
QUESTIONS = {  # data source -> operations behind the product -> forms of the question
    TWO_CALLS: {
        "-": [
            "{name} has {left} boxes with {right} {things} in each, and gives {0} {things} away. "
            "How many {things} are left?",
            "There are {left} shelves with {right} {things} each. {0} {things} are sold. "
            "How many {things} are left?",
        ],
        "+": [
            "{name} has {left} boxes with {right} {things} in each, and buys {0} more {things}. "
            "How many {things} does {name} have now?",
            "There are {left} shelves with {right} {things} each, and {0} more {things} on the "
            "floor. How many {things} are there?",
        ],
    },
    THREE_CALLS: {
        "+-": [
            "{name} has {left} boxes with {right} {things} in each, buys {0} more {things}, and "
            "then gives {1} {things} away. How many {things} are left?",
            "There are {left} shelves with {right} {things} each, and {0} more {things} on the "
            "floor. {1} {things} are sold. How many {things} are left?",
        ],
    },
}


@register_agent("calculator")
class Calculator:
    async def run(self, session: Session) -> None:
        response = ""
        num_calls = 0
        while True:
            turn = await session.say()
            response += turn.text
            if turn.finish_reason is not FinishReason.STOP or not turn.text.endswith("="):
                break
            call = CALL.search(response)
            if call is not None:
                result = f" {compute(int(call[1]), call[2], int(call[3]))}\n"
                session.give([{"role": "assistant", "content": result}])
                response += result
                num_calls += 1
        has_ended = turn.finish_reason is FinishReason.STOP
        is_right = has_ended and read_answer(response) == session.ground_truth
        session.reward(float(is_right), calls=num_calls)


def compute(left: int, operation: str, right: int) -> int:
    return {"*": left * right, "+": left + right, "-": left - right}[operation]


def read_answer(response: str) -> str:
    """Return the last number of the last line, "" if it is a call or has none."""
    last_line = response.strip().rpartition("\n")[2]
    numbers = [] if "calc" in last_line else NUMBER.findall(last_line)
    return numbers[-1] if numbers else ""


def make_split(
    seed: int, data_source: str = TWO_CALLS
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return rows for training and test; no pair of factors is in both."""
    rng = random.Random(seed)
    questions = QUESTIONS[data_source]
    train: dict[str, dict[str, Any]] = {}
    test: dict[str, dict[str, Any]] = {}
    while len(train) < NUM_TRAIN or len(test) < NUM_TEST:
        left, right = rng.randint(LOWEST, LARGEST), rng.randint(LOWEST, LARGEST)
        is_held_out = (7 * left + 3 * right) % 10 == 0
        part, size = (test, NUM_TEST) if is_held_out else (train, NUM_TRAIN)
        operations = rng.choice(sorted(questions))
        changes = [rng.randint(LOWEST, LARGEST) for _ in operations]
        question = rng.choice(questions[operations]).format(
            *changes, name=rng.choice(NAMES), things=rng.choice(THINGS), left=left, right=right
        )
        if len(part) < size:
            answer = left * right
            for operation, change in zip(operations, changes, strict=True):
                answer = compute(answer, operation, change)
            part[question] = make_row(question, answer, data_source)
    return list(train.values()), list(test.values())


def make_row(question: str, answer: int, data_source: str) -> dict[str, Any]:
    prompt = []
    for example_question, example_answer in EXAMPLES:
        prompt += [
            {"role": "user", "content": example_question},
            {"role": "assistant", "content": example_answer},
        ]
    prompt.append({"role": "user", "content": question})
    return {"prompt": prompt, "ground_truth": str(answer), "data_source": data_source}
