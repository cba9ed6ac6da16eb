"""Word problems with a calculator: questions, and the agent that computes what the model writes.

    python examples/smollm2/word_problems.py --output outputs/smollm2

A question takes a product and then a sum or a difference, of numbers from 11 to 99. Two examples in
the prompt show how to call:

    calc: 34 * 12 = 408
    calc: 408 - 58 = 350
    There are 350 pens left.

The model's turn ends at `=`. The agent continues it by the result, which is not trained.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path
from typing import Any

from mindspeed_rlxf.agents.session import Session, register_agent
from mindspeed_rlxf.rollout.rollout_engine import FinishReason

NUM_TRAIN, NUM_TEST = 1024, 128
LOWEST, LARGEST = 11, 99
CALL = re.compile(r"calc:\s*(\d{1,7})\s*([*+-])\s*(\d{1,7})\s*=$")
NUMBER = re.compile(r"\d+")
NAMES = ("Tom", "Anna", "Ben", "Eva", "Sam")
THINGS = ("apples", "books", "coins", "cards")
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


def make_split(seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return rows for training and test; no pair of factors is in both."""
    rng = random.Random(seed)
    train: dict[str, dict[str, Any]] = {}
    test: dict[str, dict[str, Any]] = {}
    while len(train) < NUM_TRAIN or len(test) < NUM_TEST:
        factors = rng.randint(LOWEST, LARGEST), rng.randint(LOWEST, LARGEST)
        other = rng.randint(LOWEST, LARGEST)
        is_held_out = (7 * factors[0] + 3 * factors[1]) % 10 == 0
        part, size = (test, NUM_TEST) if is_held_out else (train, NUM_TRAIN)
        if len(part) < size:
            row = ask(*factors, other, rng)
            part[row["prompt"][-1]["content"]] = row
    return list(train.values()), list(test.values())


def ask(left: int, right: int, other: int, rng: random.Random) -> dict[str, Any]:
    """Draw a question on three numbers; return its row."""
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    operation = rng.choice("+-")
    if operation == "-":
        questions = [
            f"{name} has {left} boxes with {right} {things} in each, and gives {other} {things} "
            f"away. How many {things} are left?",
            f"There are {left} shelves with {right} {things} each. {other} {things} are sold. "
            f"How many {things} are left?",
        ]
    else:
        questions = [
            f"{name} has {left} boxes with {right} {things} in each, and buys {other} more "
            f"{things}. How many {things} does {name} have now?",
            f"There are {left} shelves with {right} {things} each, and {other} more {things} on "
            f"the floor. How many {things} are there?",
        ]
    prompt = []
    for question, answer in EXAMPLES:
        prompt += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    prompt.append({"role": "user", "content": rng.choice(questions)})
    return {
        "prompt": prompt,
        "ground_truth": str(compute(left * right, operation, other)),
        "data_source": "calculator",
    }


def main(argv: list[str] | None = None) -> None:
    """Write `calculator_train.jsonl` and `calculator_test.jsonl`."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("outputs/smollm2"))
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(argv)
    train, test = make_split(arguments.seed)
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("test", test)):
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (arguments.output / f"calculator_{name}.jsonl").write_text(text, encoding="utf-8")
    print(f"data: {len(train)} questions for the calculator, {len(test)} test questions")


if __name__ == "__main__":
    main()
