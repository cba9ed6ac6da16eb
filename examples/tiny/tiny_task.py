"""Addition of two-digit numbers with a character tokenizer, learnt by a CPU in seconds.

A prompt is `12+34=` (always 6 tokens, no padding), a response the sum's digits and EOS. RL trains
on the problems `train` and validates on `val`; nothing is ever trained on `val`.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

MARKER = "made.json"
TOKENS = ["<pad>", "<bos>", "<eos>", *"0123456789", "+", "=", "<unk>"]
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
NUM_TRAIN, NUM_VAL = 4000, 512


@dataclass(frozen=True)
class Problem:
    """One addition; `prompt` ends with the equals sign, `answer` is the decimal sum."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        """The sum to complete."""
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        """The decimal sum."""
        return str(self.left + self.right)

    @property
    def answer_without_carry(self) -> str:
        """The sum without the carry from the ones to the tens; right in over half of all cases."""
        ones = (self.left % 10 + self.right % 10) % 10
        return str((self.left // 10 + self.right // 10) * 10 + ones)


@dataclass(frozen=True)
class Split:
    """`train` and `val` are the data sets of RL; `spare` has all other problems."""

    train: list[Problem]
    val: list[Problem]
    spare: list[Problem]


def make_split(seed: int) -> Split:
    """Shuffle all 8,100 problems and split them into NUM_TRAIN, NUM_VAL and the rest."""
    problems = [Problem(left, right) for left in range(10, 100) for right in range(10, 100)]
    random.Random(seed).shuffle(problems)
    end = NUM_TRAIN + NUM_VAL
    return Split(problems[:NUM_TRAIN], problems[NUM_TRAIN:end], problems[end:])


def make_tokenizer(tokens: Sequence[str] = TOKENS) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one id per character of `tokens`, adding no special tokens."""
    vocab = {token: index for index, token in enumerate(tokens)}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=64,
    )


def make_once(
    output: Path, version: int, seed: int, make: Callable[[Path, Split, int], None]
) -> None:
    """Write data and what `make` adds to a new folder, unless it holds this version and seed."""
    marker = output / MARKER
    wanted = {"version": version, "seed": seed}
    if marker.exists() and json.loads(marker.read_text(encoding="utf-8")) == wanted:
        print(f"{output} holds the model and its data (seed {seed})", flush=True)
        return
    shutil.rmtree(output, ignore_errors=True)
    split = make_split(seed)
    write_jsonl(output / "data" / "train.jsonl", split.train)
    write_jsonl(output / "data" / "val.jsonl", split.val)
    print(f"data: {len(split.train)} prompts, {len(split.val)} validation prompts, disjoint")
    make(output, split, seed)
    marker.write_text(json.dumps(wanted), encoding="utf-8")


def write_jsonl(path: Path, problems: list[Problem]) -> None:
    """Write a row per problem, with the trainer's default keys."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for problem in problems:
            row = {
                "prompt": problem.prompt,
                "ground_truth": problem.answer,
                "data_source": "arithmetic",
            }
            file.write(json.dumps(row) + "\n")


def corrupt(answer: str, rng: random.Random, *, max_length: int) -> tuple[str, bool]:
    """Draw a wrong response as (text, whether it ends with EOS); near misses are most frequent.

    Kinds: a sum off by 1 to 100, a digit replaced, a digit missing, digits too many, random digits,
    a stray sign, and the right digits followed by others up to `max_length` tokens, without EOS.
    """
    kind = rng.choices(
        ["near", "digit", "short", "long", "random", "sign", "endless"], [45, 25, 8, 6, 6, 4, 6]
    )[0]
    while True:
        text, ends = _wrong(kind, answer, rng, max_length)
        if not (ends and text == answer):
            return text, ends


def _wrong(kind: str, answer: str, rng: random.Random, max_length: int) -> tuple[str, bool]:
    """Draw a response of a kind; it may be the answer by chance, see `corrupt`."""

    def digits(count: int) -> str:
        return "".join(rng.choice("0123456789") for _ in range(count))

    place = rng.randrange(len(answer))
    if kind == "near":
        return str(
            max(0, int(answer) + rng.choice([-20, -11, -10, -9, -2, -1, 1, 2, 9, 10, 11, 20, 100]))
        ), True
    if kind == "digit":
        return answer[:place] + digits(1) + answer[place + 1 :], True
    if kind == "short":
        return answer[:place] + answer[place + 1 :] if rng.random() < 0.7 else "", True
    if kind == "long":
        return answer + digits(rng.randint(1, max_length - 1 - len(answer))), True
    if kind == "random":
        return digits(rng.randint(1, max_length - 1)), True
    if kind == "sign":
        return answer[:place] + rng.choice("+=") + answer[place:], True
    return (answer + digits(max_length))[:max_length], False
