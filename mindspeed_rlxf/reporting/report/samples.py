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
    training_file = run / "samples.jsonl"
    validation_file = run / "val_samples.jsonl"
    num_of_prompt = Counter(_prompt_of(sample) for sample in read_jsonl(validation_file))
    num_training = sum(1 for _ in read_jsonl(training_file))
    prompts = sorted(num_of_prompt)
    validation_limit = limit // 2 if num_training else limit
    while sum(num_of_prompt[prompt] for prompt in prompts) > validation_limit:
        prompts = prompts[::2] if len(prompts) > 1 else []
    chosen_prompts = set(prompts)
    validation = [
        sample for sample in read_jsonl(validation_file) if _prompt_of(sample) in chosen_prompts
    ]
    training: Records = []
    training_limit = limit - len(validation)
    if training_limit > 0:
        step = max(num_training / training_limit, 1.0)
        for i, sample in enumerate(read_jsonl(training_file)):
            if int(i / step) == len(training):
                training.append(sample)
    return Chosen(training, validation, num_training + num_of_prompt.total())


def cut_for_page(chosen: Chosen, run: Path, split: TokenSplitter | None = None) -> Records:
    """Return the samples in the page's format, training samples first.

    Without `split` they have no tokens and numbers.
    """
    sample_keys = {(s.get("iteration"), s.get("sample_id")) for s in chosen.training}
    numbers = _read_token_numbers(run, sample_keys) if split else {}
    entries = [_make_entry(sample, "training", split, numbers) for sample in chosen.training]
    entries += [_make_entry(sample, "validation", split, {}) for sample in chosen.validation]
    return entries


def _read_token_numbers(run: Path, sample_keys: set[tuple[Any, Any]]) -> dict[Any, dict[str, Any]]:
    """Return (iteration, sample id) -> name -> one number per response token, for these keys."""
    numbers = {}
    for file in token_files(run / "samples_tokens"):
        with open(file, "rb") as lines:
            for line in lines:
                match = KEY.match(line)
                if match is None:
                    continue
                sample_key = (int(match[1]), int(match[2]))
                if sample_key not in sample_keys:
                    continue
                with contextlib.suppress(ValueError):  # truncated by a kill
                    record = json.loads(line)
                    numbers[sample_key] = {name: record[name] for name in NUMBERS if name in record}
    return numbers


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
    if sample.get("agent_failure") is not None:
        entry["f"] = _shorten_text(sample["agent_failure"])
    turns = sample.get("turns")
    if split and turns and len(entry["r"]) < MAX_TEXT:
        entry["u"] = turns
        entry["c"] = _split_turns(split(ids), turns)
    token_numbers = numbers.get((sample.get("iteration"), sample.get("sample_id")))
    if split and token_numbers and len(entry["r"]) < MAX_TEXT:
        entry["t"] = [printable(token) for token in split(ids)]
        entry["num"] = {
            name: [_round(value) for value in values]
            for name, values in token_numbers.items()
            if len(values) == len(ids)
        }
    return entry


def _split_turns(tokens: list[str], turns: list[list[int]]) -> list[list[Any]]:
    """Return [whether it is a turn, text] for each turn and for what was given between them."""
    segments: list[list[Any]] = []
    last_end = 0
    for first, end in [*turns, [len(tokens), len(tokens)]]:
        segments.append([False, printable("".join(tokens[last_end:first]))])
        segments.append([True, printable("".join(tokens[first:end]))])
        last_end = end
    return [[is_turn, text] for is_turn, text in segments if text]


def _round(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.3g}")


def _shorten_text(value: Any) -> str:
    text = str(value)
    more = len(text) - MAX_TEXT
    return printable(text[:MAX_TEXT]) + (f" [{more} more characters]" if more > 0 else "")
