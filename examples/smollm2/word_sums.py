"""Word problems with one addition or subtraction: questions for training and test, and a score.

A question is "Tom has 15 apples and buys 6 more. How many apples does Tom have now?". A pair of
numbers, in either order, is either in training or in the test, so a right answer to a test question
is not one that was rewarded before.
"""

from __future__ import annotations

import random
import re
from typing import Any

LARGEST = 20  # larger sums are beyond a model of 135 M parameters at first: no reward, no signal
NUM_TRAIN, NUM_TEST = 2048, 256
NUM_TEST_PAIRS = 21  # of the 210 unordered pairs from 1 to LARGEST
NAMES = ("Tom", "Anna", "Lin", "Sam", "Mia", "Ben", "Eva", "Max")
THINGS = ("apples", "books", "coins", "pens", "cards", "cups")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def score(prompt: str, response: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """Return 1 if the last number of the response is the answer, else 0."""
    numbers = NUMBER.findall(response)
    return float(bool(numbers) and float(numbers[-1]) == float(ground_truth))


def make_split(seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return NUM_TRAIN and NUM_TEST rows of different questions, with no pair of numbers in both.

    A row has the keys that the trainer reads by default: `prompt`, `ground_truth`, `data_source`.
    """
    rng = random.Random(seed)
    pairs = [(low, high) for high in range(1, LARGEST + 1) for low in range(1, high + 1)]
    test_pairs = set(rng.sample(pairs, NUM_TEST_PAIRS))
    train: dict[str, int] = {}
    test: dict[str, int] = {}
    while len(train) < NUM_TRAIN or len(test) < NUM_TEST:
        left, right = rng.randint(1, LARGEST), rng.randint(1, LARGEST)
        held_out = (min(left, right), max(left, right)) in test_pairs
        part, size = (test, NUM_TEST) if held_out else (train, NUM_TRAIN)
        if len(part) < size:
            question, answer = ask(left, right, rng)
            part[question] = answer
    return _rows(train), _rows(test)


def ask(left: int, right: int, rng: random.Random) -> tuple[str, int]:
    """Draw a question on two numbers; return it with its answer, which is never negative."""
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    kind = rng.choice(("buys", "gives", "boxes"))
    if kind == "buys":
        start = f"{name} has {left} {things} and buys {right} more."
        return f"{start} How many {things} does {name} have now?", left + right
    if kind == "gives":
        more, less = max(left, right), min(left, right)
        start = f"{name} has {more} {things} and gives away {less}."
        return f"{start} How many {things} are left?", more - less
    start = f"There are {left} {things} in one box and {right} {things} in another."
    return f"{start} How many {things} are there in total?", left + right


def _rows(answers: dict[str, int]) -> list[dict[str, Any]]:
    return [
        {
            "prompt": [{"role": "user", "content": question}],
            "ground_truth": str(answer),
            "data_source": "word_sums",
        }
        for question, answer in answers.items()
    ]
