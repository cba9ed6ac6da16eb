"""Prompt data sets: rows of files become tokenized prompts, or one list of every problem found."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from mindspeed_rlxf.config.errors import Problem, UserError
from mindspeed_rlxf.config.schema import DataConfig
from mindspeed_rlxf.data.chats import OutOfBoundsError, fill_in
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
from mindspeed_rlxf.data.special_tokens import SpecialTokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

ROLE = re.compile(r"[\w .:-]{1,64}")  # a template such as `<{role}>` would make tokens of others
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


@dataclass
class _TextRow:
    """A row before tokenization.

    text: a chat's after its template, which has written its special tokens itself; where the
          messages spell such tokens, words stand for these (see `SpecialTokens`)
    """

    row: int
    prompt: str | list[dict[str, Any]]
    ground_truth: str
    data_source: str
    text: str = ""

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.prompt, str)

    @property
    def num_characters(self) -> int:
        if isinstance(self.prompt, str):
            return len(self.prompt)
        return sum(len(message["content"]) for message in self.prompt)


def load_prompts(
    files: str | Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    max_prompt_length: int,
) -> list[Prompt]:
    """All prompts of `files`, in order; no files, no prompts.

    A prompt is a string, tokenized as `tokenizer(text, add_special_tokens=True)` without the EOS
    some tokenizers append, or a list of chat messages, put through the tokenizer's chat template
    with the generation prompt. Special tokens that the texts of rows spell are text unless
    `data.allow_special_tokens`; those that the template writes are tokens. Prompts over
    `max_prompt_length` tokens are problems, or dropped or cut, counted and logged
    (`data.overlong_prompts`).
    Raises UserError with every problem, each keyed by `file:row`.
    """
    names = [files] if isinstance(files, str) else list(files)
    reader = _Reader(tokenizer, data, max_prompt_length)
    problems: list[Problem] = []
    prompts: list[Prompt] = []
    for name in names:
        found = FileProblems(name)
        for row, text, token_ids in reader.read(name, found):
            prompts.append(_prompt(len(prompts), row, text, token_ids))
        problems += found.located()
    if problems:
        raise UserError(problems)
    return prompts


class _Reader:
    """Tokenizes the prompts of files, a chunk of rows at a time."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, data: DataConfig, max_prompt_length: int
    ) -> None:
        self._tokenizer, self._data, self._max_length = tokenizer, data, max_prompt_length
        self._num_eos = num_appended_eos(tokenizer)
        self._special = SpecialTokens(tokenizer)

    def read(self, file: str, found: FileProblems) -> Iterator[tuple[_TextRow, str, list[int]]]:
        """(row, text, token ids) of the prompts that are kept."""
        limit = LengthLimit(file, self._max_length, self._data.overlong_prompts)
        rows, num_rows, num_spelled = _text_rows(file, self._data, found), 0, 0
        while chunk := list(islice(rows, ENCODE_CHUNK)):
            num_rows += len(chunk)
            short = [row for row in chunk if limit.may_fit(row.row, row.num_characters, found)]
            if not self._data.allow_special_tokens:
                num_spelled += sum(self._special.spelled_in(row.prompt) for row in short)
            try:
                texts = self._with_texts(short, found)
            except OutOfBoundsError:
                break  # of the template: every row would take as long
            for row in texts:
                row.text = limit.cut_text(row.text)
            for row, token_ids in self._tokenized(texts):
                kept = limit.fit(row.row, token_ids, found)
                if kept is not None:
                    text = self._special.shown(row.text)
                    yield row, text if kept is token_ids else self._decoded(kept), kept
        limit.report(num_rows, found)
        if num_spelled:
            logger.warning(
                "%s: %d of %d prompts spell special tokens of the tokenizer, which are read as "
                "text; data.allow_special_tokens=true reads them as tokens",
                file,
                num_spelled,
                num_rows,
            )

    def _decoded(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids))

    def _with_texts(self, rows: list[_TextRow], problems: FileProblems) -> list[_TextRow]:
        """The rows whose text can be tokenized; raises OutOfBoundsError, which is told."""
        chats = [row for row in rows if row.is_chat]
        given = [self._messages(row) for row in chats]
        filled = fill_in(self._tokenizer, given)
        good = []
        for row in rows:
            reason = ""
            if row.is_chat:
                try:
                    row.text, reason = next(filled)
                except OutOfBoundsError as error:
                    problems.add(row.row, _of_template(str(error)))
                    raise
            else:
                row.text = str(row.prompt)
            problem = _of_template(reason) if reason else _text_problem(row.text)
            if problem:
                problems.add(row.row, problem)
            else:
                good.append(row)
        return good

    def _messages(self, row: _TextRow) -> list[dict[str, Any]]:
        messages = row.prompt
        assert not isinstance(messages, str), "a chat"
        if self._data.allow_special_tokens or not self._special.spelled_in(messages):
            return messages
        return [self._special.hidden(message) for message in messages]

    def _tokenized(self, rows: list[_TextRow]) -> Iterator[tuple[_TextRow, list[int]]]:
        """Each row with its token ids, in order, without an EOS that the tokenizer appends."""
        encoded: dict[int, list[int]] = {}
        split = not self._data.allow_special_tokens
        for row in rows:
            if row.is_chat and self._special.hides(row.text):
                encoded[row.row] = self._special.token_ids(row.text)
        for is_chat in (False, True):
            alike = [row for row in rows if row.is_chat is is_chat and row.row not in encoded]
            texts, cut = [row.text for row in alike], 0 if is_chat else self._num_eos
            all_ids = _token_ids(self._tokenizer, texts, not is_chat, split and not is_chat)
            for row, ids in zip(alike, all_ids, strict=True):
                encoded[row.row] = ids[: len(ids) - cut]
        yield from ((row, encoded[row.row]) for row in rows)


def _text_rows(file: str, data: DataConfig, problems: FileProblems) -> Iterator[_TextRow]:
    """Rows of a file with all their fields in order; the others go to `problems`."""
    for number, row in read_rows(file, problems):
        prompt = look_up(row, data.prompt_key)
        problem = _prompt_problem(prompt)
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
            yield _TextRow(number, prompt, ground_truth, source)


RULE = "a prompt must be text or a list of chat messages {role, content}"


def _prompt_problem(prompt: Any) -> Problem | None:
    if isinstance(prompt, str):
        return _text_problem(prompt)
    if isinstance(prompt, list) and prompt and all(map(_is_message, prompt)):
        return None
    return fault(f"{RULE}, this one is {shown(prompt)}", "write it as text")


def _text_problem(text: str) -> Problem | None:
    if not text.strip():
        return fault(f"{RULE} and not empty", "complete or remove the row")
    return unicode_problem(text)


def _of_template(reason: str) -> Problem:
    return fault(
        f"the tokenizer's chat template must accept the messages: {reason}",
        "give the tokenizer's folder a fitting chat template, or write the prompt as text",
    )


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and bool(ROLE.fullmatch(message["role"]))
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


def _token_ids(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], add_special_tokens: bool, split: bool
) -> list[list[int]]:
    """split: special tokens that the texts spell are text."""
    if not texts:
        return []
    ids: list[list[int]] = tokenizer(
        texts, add_special_tokens=add_special_tokens, split_special_tokens=split
    )["input_ids"]
    return ids


def num_appended_eos(tokenizer: PreTrainedTokenizerBase) -> int:
    """How many EOS tokens the tokenizer itself puts behind a text: 0, or 1 for some.

    An EOS that the text spells out stays: only the difference to the bare text counts.
    """

    def trailing_eos(add_special_tokens: bool) -> int:
        (ids,) = _token_ids(tokenizer, ["a"], add_special_tokens, split=False)
        count = 0
        while count < len(ids) and ids[-1 - count] == tokenizer.eos_token_id:
            count += 1
        return count

    return max(trailing_eos(True) - trailing_eos(False), 0)


def _prompt(index: int, row: _TextRow, text: str, token_ids: list[int]) -> Prompt:
    ids = np.asarray(token_ids, dtype=np.int64)
    return Prompt(index, text, ids, row.ground_truth, row.data_source)
