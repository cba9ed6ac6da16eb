"""Choose samples of a run for the report, evenly over its iterations, and shorten them."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_rlxf.config.printable import printable
from mindspeed_rlxf.reporting.metrics import read_jsonl
from mindspeed_rlxf.reporting.sample_tokens import NUMBERS, token_files

MAX_SAMPLES = 2000  # of a report
MAX_TEXT = 20_000  # characters of a prompt or a response that are shown
KEY = re.compile(rb'\{"iteration": (\d+), "sample_id": (\d+),')

TokenSplitter = Callable[[list[int]], list[str]]
"""Splits a response into the texts of its tokens: as many as ids, "" for a part of a character."""
Records = list[dict[str, Any]]


@dataclass(frozen=True)
class Chosen:
    """Samples of a report. seen: number of samples in the files"""

    training: Records
    validation: Records
    seen: int = 0

    @property
    def count(self) -> int:
        return len(self.training) + len(self.validation)

    def halve(self) -> Chosen:
        """Return every second training sample, and all samples of every second prompt.

        None if at most one of each kind is left.
        """
        kept = _every_second_prompt(self.validation)
        if len(kept) == len(self.validation) and len(self.training) < 2:
            return Chosen([], [], self.seen)
        return Chosen(self.training[::2], kept, self.seen)


def choose_samples(run: Path, limit: int = MAX_SAMPLES) -> Chosen:
    """Choose at most `limit` samples: training samples evenly, and validation prompts evenly.

    All responses to a chosen validation prompt are kept; they are at most half of the samples if
    there are samples of training. Holds about 4 * limit samples in memory.
    """
    validation, seen_there = _choose_prompts(run / "val_samples.jsonl", limit)
    has_training = next(read_jsonl(run / "samples.jsonl"), None) is not None
    while len(validation) > (limit // 2 if has_training else limit):
        prompts = {_prompt_of(sample) for sample in validation}
        validation = _every_second_prompt(validation) if len(prompts) > 1 else []
    training, seen = _choose_evenly(run / "samples.jsonl", limit - len(validation))
    return Chosen(training, validation, seen + seen_there)


def cut_for_page(
    chosen: Chosen, run: Path, split: TokenSplitter | None = None, every: int = 1
) -> Records:
    """Return the samples in the form that the page reads, training samples first.

    split: None = no tokens and no numbers; every: one in `every` training samples has them
    """
    wanted = {(s.get("iteration"), s.get("sample_id")) for s in chosen.training[::every]}
    numbers = read_token_numbers(run, wanted) if split else {}
    cut = [_make_entry(sample, "training", split, numbers) for sample in chosen.training]
    return cut + [_make_entry(sample, "validation", None, {}) for sample in chosen.validation]


def read_token_numbers(run: Path, wanted: set[tuple[Any, Any]]) -> dict[Any, dict[str, Any]]:
    """Return (iteration, sample id) -> name -> one number per response token, for those wanted."""
    found = {}
    for file in token_files(run / "samples_tokens"):
        with open(file, "rb") as lines:
            for line in lines:
                key = KEY.match(line)
                if key is None or (place := (int(key[1]), int(key[2]))) not in wanted:
                    continue
                with contextlib.suppress(ValueError):  # cut by a kill
                    record = json.loads(line)
                    found[place] = {name: record[name] for name in NUMBERS if name in record}
    return found


def _choose_evenly(file: Path, limit: int) -> tuple[Records, int]:
    """Return at most `limit` records at equal distances, and the number of all records."""
    kept: Records = []
    stride, count = 1, 0
    for record in read_jsonl(file):
        if count % stride == 0:
            kept.append(record)
        count += 1
        if len(kept) > 2 * limit:
            kept, stride = kept[::2], 2 * stride
    if len(kept) > limit:
        kept = [kept[i * len(kept) // limit] for i in range(limit)]
    return kept, count


def _choose_prompts(file: Path, limit: int) -> tuple[Records, int]:
    """Return at most 4 * limit records of evenly chosen prompts, and the number of all records."""
    kept: Records = []
    step, count = 1, 0
    for record in read_jsonl(file):
        count += 1
        if _prompt_of(record) % step == 0:
            kept.append(record)
        while len(kept) > 4 * limit and step < 2**40:
            step *= 2
            kept = [each for each in kept if _prompt_of(each) % step == 0]
    return kept[: 4 * limit], count


def _every_second_prompt(samples: Records) -> Records:
    """Return the samples of every second prompt; of a single prompt every second sample."""
    prompts = sorted({_prompt_of(sample) for sample in samples})
    half = set(prompts[::2])
    kept = [sample for sample in samples if _prompt_of(sample) in half]
    return kept if len(prompts) > 1 else samples[::2]


def _prompt_of(sample: dict[str, Any]) -> int:
    number = sample.get("prompt_id", sample.get("sample_id"))
    return number if isinstance(number, int) else 0


def _make_entry(
    sample: dict[str, Any], kind: str, split: TokenSplitter | None, numbers: dict[Any, Any]
) -> dict[str, Any]:
    """Return a sample with short names and shortened texts, whose control characters are escaped.

    Tokens and their numbers are added if the response is not shortened.
    """
    ids = sample.get("response_ids") or []
    entry: dict[str, Any] = {
        "i": sample.get("iteration"), "id": sample.get("sample_id"), "k": kind,
        "p": _shorten_text(sample.get("prompt")), "r": _shorten_text(sample.get("response")),
        "s": sample.get("score"), "n": len(ids), "parts": sample.get("reward_parts") or {},
    }  # fmt: skip
    for name, short in (("data_source", "d"), ("ground_truth", "gt"), ("answer", "a")):
        if sample.get(name) is not None:
            entry[short] = _shorten_text(sample[name])
    if kind == "validation":
        entry["pid"] = _prompt_of(sample)
    found = numbers.get((sample.get("iteration"), sample.get("sample_id")))
    if split and found and len(entry["r"]) < MAX_TEXT:
        entry["t"] = [printable(piece) for piece in split(ids)]
        entry["num"] = {
            name: [None if v is None else float(f"{v:.3g}") for v in values]
            for name, values in found.items()
            if len(values) == len(ids)
        }
    return entry


def _shorten_text(value: Any) -> str:
    text = str(value)
    more = len(text) - MAX_TEXT
    return printable(text[:MAX_TEXT]) + (f" [{more} more characters]" if more > 0 else "")
