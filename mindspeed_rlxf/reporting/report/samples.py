"""Select samples for the report, evenly over iterations, and shorten them."""

import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from mindspeed_rlxf.config.problems import printable
from mindspeed_rlxf.reporting.jsonl import NUMBERS, read_jsonl, token_files

MAX_SAMPLES = 2000  # of a report
MAX_TEXT = 20_000  # characters of a prompt or a response that are shown
KEY = re.compile(rb'\{"iteration": (\d+), "sample_id": (\d+),')

TokenSplitter = Callable[[list[int]], list[str]]
"""Splits a response into the texts of its tokens: as many as ids, "" for a part of a character."""
Records = list[dict[str, Any]]


class Chosen(NamedTuple):
    """Samples for a report. seen: number of samples in the files."""

    training: Records
    validation: Records
    seen: int


def choose_samples(run: Path, limit: int = MAX_SAMPLES) -> Chosen:
    """Select at most `limit` samples: training samples evenly, and validation prompts evenly.

    A selected validation prompt keeps all its responses. Validation gets at most half the samples
    if there are training samples.
    """
    file, validations = run / "samples.jsonl", run / "val_samples.jsonl"
    counts = Counter(_prompt_of(sample) for sample in read_jsonl(validations))
    seen = sum(1 for _ in read_jsonl(file))
    prompts = sorted(counts)
    while sum(counts[prompt] for prompt in prompts) > (limit // 2 if seen else limit):
        prompts = prompts[::2] if len(prompts) > 1 else []
    wanted = set(prompts)
    validation = [each for each in read_jsonl(validations) if _prompt_of(each) in wanted]
    training: Records = []
    step = max(seen / max(limit - len(validation), 1), 1.0)
    for i, sample in enumerate(read_jsonl(file) if limit > len(validation) else ()):
        if int(i / step) == len(training):
            training.append(sample)
    return Chosen(training, validation, seen + counts.total())


def cut_for_page(chosen: Chosen, run: Path, split: TokenSplitter | None = None) -> Records:
    """Return the samples in the page's format, training samples first.

    Without `split` they have no tokens and numbers.
    """
    wanted = {(s.get("iteration"), s.get("sample_id")) for s in chosen.training}
    numbers = _read_token_numbers(run, wanted) if split else {}
    cut = [_make_entry(sample, "training", split, numbers) for sample in chosen.training]
    return cut + [_make_entry(sample, "validation", None, {}) for sample in chosen.validation]


def _read_token_numbers(run: Path, wanted: set[tuple[Any, Any]]) -> dict[Any, dict[str, Any]]:
    """Return (iteration, sample id) -> name -> one number per response token."""
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


def _prompt_of(sample: dict[str, Any]) -> int:
    number = sample.get("prompt_id", sample.get("sample_id"))
    return number if isinstance(number, int) else 0


def _make_entry(
    sample: dict[str, Any], kind: str, split: TokenSplitter | None, numbers: dict[Any, Any]
) -> dict[str, Any]:
    """Return a sample with short keys and texts; a complete response has its tokens."""
    ids = sample.get("response_ids") or []
    entry: dict[str, Any] = {
        "i": sample.get("iteration"), "id": sample.get("sample_id"), "k": kind,
        "p": _shorten_text(sample.get("prompt")), "r": _shorten_text(sample.get("response")),
        "s": sample.get("score"), "n": len(ids), "parts": sample.get("reward_parts") or {},
    }  # fmt: skip
    for name, short in (("data_source", "d"), ("ground_truth", "gt"), ("answer", "a")):
        if sample.get(name) is not None:
            entry[short] = _shorten_text(sample[name])
    columns = sample.get("extra_info")
    if isinstance(columns, dict):
        entry["x"] = {printable(str(name)): _shorten_text(value) for name, value in columns.items()}
    found = numbers.get((sample.get("iteration"), sample.get("sample_id")))
    if split and found and len(entry["r"]) < MAX_TEXT:
        entry["t"] = [printable(piece) for piece in split(ids)]
        entry["num"] = {name: [None if v is None else float(f"{v:.3g}") for v in values]
                        for name, values in found.items() if len(values) == len(ids)}  # fmt: skip
    return entry


def _shorten_text(value: Any) -> str:
    text = str(value)
    more = len(text) - MAX_TEXT
    return printable(text[:MAX_TEXT]) + (f" [{more} more characters]" if more > 0 else "")
