"""Choose samples of a run for the report, evenly over its iterations, and shorten them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_rlxf.files.plain import parse_json
from mindspeed_rlxf.files.printable import printable
from mindspeed_rlxf.reporting.metrics import read_jsonl
from mindspeed_rlxf.reporting.sample_tokens import NUMBERS, token_files

MAX_SAMPLES = 2000  # of a report
VALIDATION_SHARE = (
    0.5  # most of the samples that may be of validation, if there are training samples
)
MAX_TEXT = 20_000  # characters of a prompt or a response that are shown
KEY = re.compile(rb'\{"iteration": (\d+), "sample_id": (\d+),')

TokenSplitter = Callable[[list[int]], list[str]]
"""Splits a response into the texts of its tokens: as many as ids, "" for a part of a character."""


@dataclass(frozen=True)
class Chosen:
    """Samples of a report. seen: number of samples in the files"""

    training: list[dict[str, Any]]
    validation: list[dict[str, Any]]
    seen: int = 0

    @property
    def count(self) -> int:
        return len(self.training) + len(self.validation)

    def halve(self) -> Chosen:
        """Return every second training sample, and all samples of every second validation prompt.

        The first ones are kept; prompts are taken in the order of `_prompt_of`. Of a single
        validation prompt: every second sample. If at most one of each kind is left: none.
        """
        prompts = sorted({_prompt_of(sample) for sample in self.validation})
        if len(prompts) > 1:
            half = set(prompts[::2])
            kept = [sample for sample in self.validation if _prompt_of(sample) in half]
        else:
            kept = self.validation[::2]
        if len(kept) == len(self.validation) and len(self.training) < 2:
            return Chosen([], [], self.seen)
        return Chosen(self.training[::2], kept, self.seen)


def choose_samples(run: Path, limit: int = MAX_SAMPLES) -> Chosen:
    """Choose at most `limit` samples: training samples evenly, and validation prompts evenly.

    All responses to a chosen validation prompt are kept. At most VALIDATION_SHARE of `limit` are of
    validation, or `limit` without training samples: prompts are halved until that holds, and a last
    prompt that has more responses is left out. Training samples get the rest of `limit`.
    Memory: at most about 4 * limit samples.
    """
    validation, seen_there = _choose_prompts(run / "val_samples.jsonl", limit)
    has_training = next(read_jsonl(run / "samples.jsonl"), None) is not None
    share = int(limit * VALIDATION_SHARE) if has_training else limit
    while len(validation) > share and (prompts := {_prompt_of(s) for s in validation}):
        kept = set(sorted(prompts)[::2]) if len(prompts) > 1 else set()
        validation = [s for s in validation if _prompt_of(s) in kept]
    training, seen = _choose_evenly(run / "samples.jsonl", limit - len(validation))
    return Chosen(training, validation, seen + seen_there)


def cut_for_page(
    chosen: Chosen, run: Path, split: TokenSplitter | None = None, every: int = 1
) -> list[dict[str, Any]]:
    """Return the samples in the form that the page reads, with short names and shortened texts.

    Training samples come first. split: None = no tokens and no numbers; every: one in `every`
    training samples has its tokens and numbers, validation samples have none
    """
    wanted = {(s.get("iteration"), s.get("sample_id")) for s in chosen.training[::every]}
    numbers = read_token_numbers(run, wanted) if split else {}
    cut = [_make_entry(sample, "training", split, numbers) for sample in chosen.training]
    return cut + [_make_entry(sample, "validation", None, {}) for sample in chosen.validation]


def read_token_numbers(
    run: Path, wanted: set[tuple[Any, Any]]
) -> dict[tuple[int, int], dict[str, list[float | None]]]:
    """Return (iteration, sample id) -> name -> one number per response token.

    Only names of NUMBERS. Of several lines of a sample the last counts. Damaged files are read up
    to the damage. wanted: (iteration, sample id) to look for; those without a line are absent from
    the result
    """
    found = {}
    for file in token_files(run / "samples_tokens"):
        with open(file, "rb") as lines:
            for line in lines:
                key = KEY.match(line)
                if key is None or (place := (int(key[1]), int(key[2]))) not in wanted:
                    continue
                with contextlib.suppress(ValueError):
                    record = parse_json(line)
                    found[place] = {name: record[name] for name in NUMBERS if name in record}
    return found


def _choose_evenly(file: Path, limit: int) -> tuple[list[dict[str, Any]], int]:
    """Return at most `limit` records of a file, and the number of all its records.

    The chosen ones are at equal distances, in their order.
    """
    kept: list[dict[str, Any]] = []
    stride, count = 1, 0
    for record in read_jsonl(file):
        if count % stride == 0:
            kept.append(record)
        count += 1
        if len(kept) > 2 * limit:
            kept, stride = kept[::2], 2 * stride
    if len(kept) > limit:  # between one and two times as many: leave some out, evenly
        kept = [kept[i * len(kept) // limit] for i in range(limit)]
    return kept, count


def _choose_prompts(file: Path, limit: int) -> tuple[list[dict[str, Any]], int]:
    """Return all responses to evenly chosen prompts, and the number of responses in the file.

    Responses are in the order of the file, at most 4 * limit. The prompts are those whose number is
    a multiple of the smallest power of two with which that many remain.
    """
    kept: list[dict[str, Any]] = []
    step, count = 1, 0
    for record in read_jsonl(file):
        count += 1
        if _prompt_of(record) % step == 0:
            kept.append(record)
        while len(kept) > 4 * limit and step < 2**40:
            step *= 2
            kept = [each for each in kept if _prompt_of(each) % step == 0]
    return kept[: 4 * limit], count


def _prompt_of(sample: dict[str, Any]) -> int:
    """Return the sample's `prompt_id`, or without one its `sample_id`; 0 if that is no integer."""
    number = sample.get("prompt_id", sample.get("sample_id"))
    return number if isinstance(number, int) else 0


def _make_entry(
    sample: dict[str, Any],
    kind: str,
    split: TokenSplitter | None,
    numbers: dict[Any, dict[str, Any]],
) -> dict[str, Any]:
    """Return the entry of a sample for the page: short names, and texts that are shortened.

    Control characters are escaped, HTML is not.

    kind: "training" or "validation"; the latter adds the prompt's id
    numbers: by (iteration, sample id). Tokens and their numbers are added if `split` is given, the
             sample has numbers, and its escaped response has under MAX_TEXT characters; a name
             whose numbers are not one for each token is left out
    """
    ids = sample.get("response_ids")
    ids = ids if isinstance(ids, list) and all(isinstance(i, int) for i in ids) else []
    parts = sample.get("reward_parts")
    entry: dict[str, Any] = {
        "i": sample.get("iteration"), "id": sample.get("sample_id"), "k": kind,
        "p": _shorten_text(sample.get("prompt")), "r": _shorten_text(sample.get("response")),
        "s": sample.get("score"), "n": len(ids),
        "parts": parts if isinstance(parts, dict) else {},
    }  # fmt: skip
    for name, short in (("data_source", "d"), ("ground_truth", "gt"), ("answer", "a")):
        if sample.get(name) is not None:
            entry[short] = _shorten_text(sample[name])
    if kind == "validation":
        entry["pid"] = _prompt_of(sample)
    found = numbers.get((sample.get("iteration"), sample.get("sample_id")))
    if split and found and len(entry["r"]) < MAX_TEXT:
        entry["t"] = [printable(piece) for piece in split(ids)]
        entry["num"] = {k: [*map(_short, v)] for k, v in found.items() if len(v) == len(ids)}
    return entry


def _short(value: Any) -> float | None:
    """Round a number to three significant digits, as the page only shows it as a colour.

    None for what is no number.
    """
    return float(f"{value:.3g}") if isinstance(value, (int, float)) else None


def _shorten_text(value: Any) -> str:
    """Return the first MAX_TEXT characters of a value's text; control characters are escaped.

    If some were cut off, " [N more characters]" follows.
    """
    text = value if isinstance(value, str) else str(value)
    more = len(text) - MAX_TEXT
    return printable(text[:MAX_TEXT]) + (f" [{more} more characters]" if more > 0 else "")
