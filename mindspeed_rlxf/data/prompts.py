"""Prompt data sets: rows of files become tokenized prompts, or one list of every problem found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mindspeed_rlxf.config.errors import Problem, UserError
from mindspeed_rlxf.config.schema import DataConfig
from mindspeed_rlxf.data.files import (
    FileProblems,
    describe_keys,
    fault,
    look_up,
    read_rows,
    shown,
    unicode_problem,
)
from mindspeed_rlxf.data.lengths import LengthLimit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENCODE_CHUNK = 1024  # texts per tokenizer call; fast tokenizers share a call between threads

Int64Array = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class Prompt:
    """One prompt of a data set.

    index:        position in the data set, from 0, over all files, without dropped rows
    text:         what was tokenized (a chat after its template); of a prompt that was cut, or read
                  from an indexed data set, the decoded ids
    token_ids:    [prompt] int64, at least 1 and at most max_prompt_length, no EOS appended
    ground_truth: what a rule compares with, "" when the row has none
    data_source:  picks the rule and names the validation metrics
    """

    index: int
    text: str
    token_ids: Int64Array
    ground_truth: str
    data_source: str


@dataclass(frozen=True)
class _TextRow:
    """A row before tokenization; a chat's template has written its special tokens itself."""

    row: int
    text: str
    is_chat: bool
    ground_truth: str
    data_source: str


def load_prompts(
    files: str | Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    max_prompt_length: int,
) -> list[Prompt]:
    """All prompts of `files`, in order; no files, no prompts.

    A prompt is a string, tokenized as `tokenizer(text, add_special_tokens=True)` without the EOS
    some tokenizers append, or a list of chat messages, put through the tokenizer's chat template
    with the generation prompt. Prompts over `max_prompt_length` tokens are problems, or dropped or
    cut, counted and logged (`data.overlong_prompts`).
    Raises UserError with every problem, each keyed by `file:row`.
    """
    names = [files] if isinstance(files, str) else list(files)
    num_eos = num_appended_eos(tokenizer)
    problems: list[Problem] = []
    prompts: list[Prompt] = []
    for name in names:
        found = FileProblems(name)
        limit = LengthLimit(name, max_prompt_length, data.overlong_prompts)
        rows = list(_text_rows(name, tokenizer, data, found))
        for row, token_ids in _tokenized(tokenizer, rows, num_eos):
            kept = limit.fit(row.row, token_ids, found)
            if kept is not None:
                text = row.text if kept is token_ids else str(tokenizer.decode(kept))
                prompts.append(_prompt(len(prompts), row, text, kept))
        limit.report(len(rows), found)
        problems += found.located()
    if problems:
        raise UserError(problems)
    return prompts


def _text_rows(
    file: str, tokenizer: PreTrainedTokenizerBase, data: DataConfig, problems: FileProblems
) -> Iterator[_TextRow]:
    """Rows of a file with all their fields in order; the others go to `problems`."""
    for number, row in read_rows(file, problems):
        prompt = look_up(row, data.prompt_key)
        text, problem = _prompt_text(prompt, tokenizer)
        if prompt is None:
            rule = f"a row must have a {data.prompt_key!r}, this one has {describe_keys(row)}"
            remedy = "set data.prompt_key to the key of the prompt, or complete the row"
            problem = fault(rule, remedy)
        ground_truth, ground_truth_problem = ground_truth_of(look_up(row, data.ground_truth_key))
        source, source_problem = data_source_of(look_up(row, data.data_source_key), data)
        found = [p for p in (problem, ground_truth_problem, source_problem) if p]
        for each in found:
            problems.add(number, each)
        if not found:
            yield _TextRow(number, text, not isinstance(prompt, str), ground_truth, source)


def _prompt_text(prompt: Any, tokenizer: PreTrainedTokenizerBase) -> tuple[str, Problem | None]:
    """(text, None) of a prompt value, or ("", problem)."""
    rule = "a prompt must be text or a list of chat messages {role, content}"
    if isinstance(prompt, str):
        text = prompt
    elif isinstance(prompt, list) and prompt and all(map(_is_message, prompt)):
        try:
            messages = [{k: v for k, v in m.items() if v is not None} for m in prompt]
            text = str(
                tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            )
        except Exception as error:  # a template is code of the tokenizer's folder: any kind
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            return "", fault(
                f"the tokenizer's chat template must accept the messages: {reason}",
                "give the tokenizer's folder a fitting chat template, or write the prompt as text",
            )
    else:
        return "", fault(f"{rule}, this one is {shown(prompt)}", "write it as text")
    if not text.strip():
        return "", fault(f"{rule} and not empty", "complete or remove the row")
    problem = unicode_problem(text)
    return ("", problem) if problem else (text, None)


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
    )


def ground_truth_of(value: Any) -> tuple[str, Problem | None]:
    """(text, None) of a ground truth, absent = "", or ("", problem)."""
    if value is None:
        return "", None
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return str(value), None
    return "", fault(
        f"a ground truth must be text or a number, this one is {value!r:.60}", "write it as text"
    )


def data_source_of(value: Any, data: DataConfig) -> tuple[str, Problem | None]:
    """(name, None) of a row's data source, or ("", problem)."""
    if value is None:
        value = data.default_data_source
    if isinstance(value, str) and value:
        return value, None
    rule = f"a row must name its data source in {data.data_source_key!r}"
    found = "it has none" if value is None else f"this one is {value!r:.60}"
    return "", fault(f"{rule}, {found}", "add it to the rows or set data.default_data_source")


def _tokenized(
    tokenizer: PreTrainedTokenizerBase, rows: list[_TextRow], num_eos: int
) -> Iterator[tuple[_TextRow, list[int]]]:
    """Each row with its token ids, in order; `num_eos` of them at the end are not the prompt's."""
    for start in range(0, len(rows), ENCODE_CHUNK):
        chunk = rows[start : start + ENCODE_CHUNK]
        encoded: dict[int, list[int]] = {}
        for is_chat in (False, True):
            places = [i for i, row in enumerate(chunk) if row.is_chat is is_chat]
            texts = [chunk[i].text for i in places]
            cut = 0 if is_chat else num_eos
            for place, ids in zip(places, _token_ids(tokenizer, texts, not is_chat), strict=True):
                encoded[place] = ids[: len(ids) - cut]
        yield from ((row, encoded[i]) for i, row in enumerate(chunk))


def _token_ids(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], add_special_tokens: bool
) -> list[list[int]]:
    if not texts:
        return []
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=add_special_tokens)["input_ids"]
    return ids


def num_appended_eos(tokenizer: PreTrainedTokenizerBase) -> int:
    """How many EOS tokens the tokenizer itself puts behind a text: 0, or 1 for some.

    An EOS that the text spells out stays: only the difference to the bare text counts.
    """

    def trailing_eos(add_special_tokens: bool) -> int:
        (ids,) = _token_ids(tokenizer, ["a"], add_special_tokens)
        count = 0
        while count < len(ids) and ids[-1 - count] == tokenizer.eos_token_id:
            count += 1
        return count

    return max(trailing_eos(True) - trailing_eos(False), 0)


def _prompt(index: int, row: _TextRow, text: str, token_ids: list[int]) -> Prompt:
    ids = np.asarray(token_ids, dtype=np.int64)
    return Prompt(index, text, ids, row.ground_truth, row.data_source)
