"""Load prompt data sets: tokenize the rows of files, or report every problem in one list."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from mindspeed_rlxf.config.errors import Problem, UserError
from mindspeed_rlxf.config.schema import DataConfig
from mindspeed_rlxf.config.suggest import shown
from mindspeed_rlxf.data.chats import fill_in
from mindspeed_rlxf.data.files import (
    FileProblems,
    Row,
    describe_keys,
    fault,
    look_up,
    read_rows,
    unicode_problem,
)
from mindspeed_rlxf.data.lengths import LengthLimit
from mindspeed_rlxf.data.special_tokens import SpecialTokens
from mindspeed_rlxf.files.bounded import OutOfBoundsError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

ROLE = re.compile(r"[\w .:-]{1,64}")  # templates such as `<{role}>` could make tokens of others
ENCODE_CHUNK = 1024  # texts per tokenizer call; fast tokenizers share a call between threads

RULE = "a prompt must be text or a list of chat messages {role, content}"

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

    text: what to tokenize. A chat after its template, with the template's special tokens; those
          that the messages spell are replaced by words (see `SpecialTokens`)
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
    """Load all prompts of `files`, in order; no files give no prompts.

    A prompt is a string, tokenized as `tokenizer(text, add_special_tokens=True)` without the EOS
    some tokenizers append, or a list of chat messages, put through the tokenizer's chat template
    with the generation prompt. Special tokens that the texts of rows spell are text unless
    `data.allow_special_tokens`; those that the template writes are tokens. Prompts over
    `max_prompt_length` tokens are reported as problems, or dropped or cut and then counted in the
    log (`data.overlong_prompts`).
    Raises UserError with every problem, each keyed by `file:row`.
    """
    names = [files] if isinstance(files, str) else list(files)
    reader = _Reader(tokenizer, data, max_prompt_length)
    problems: list[Problem] = []
    prompts: list[Prompt] = []
    for name in names:
        found = FileProblems(name)
        for row, text, token_ids in reader.read(name, found):
            ids = np.asarray(token_ids, dtype=np.int64)
            prompts.append(Prompt(len(prompts), text, ids, row.ground_truth, row.data_source))
        problems += found.list_problems()
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
        """Yield (row, text, token ids) of the prompts that are kept."""
        limit = LengthLimit(file, self._max_length, self._data.overlong_prompts)
        rows, num_rows, num_spelled = _read_rows(file, self._data, found), 0, 0
        while chunk := list(islice(rows, ENCODE_CHUNK)):
            num_rows += len(chunk)
            short = [row for row in chunk if limit.may_fit(row.row, row.num_characters, found)]
            if not self._data.allow_special_tokens:
                num_spelled += sum(self._special.are_in(row.prompt) for row in short)
            try:
                texts = self._fill_templates(short, found)
            except OutOfBoundsError:
                break  # every other row would take the template as long
            for row in texts:
                row.text = limit.cut_text(row.text)
            for row, token_ids in self._tokenize(texts):
                kept = limit.fit(row.row, token_ids, found)
                if kept is token_ids:
                    yield row, self._special.restore(row.text), kept
                elif kept is not None:
                    yield row, str(self._tokenizer.decode(kept)), kept
        limit.report(num_rows, found)
        if num_spelled:
            logger.warning(
                "%s: %d of %d prompts spell special tokens of the tokenizer, which are read as "
                "text; data.allow_special_tokens=true reads them as tokens",
                file,
                num_spelled,
                num_rows,
            )

    def _fill_templates(self, rows: list[_TextRow], problems: FileProblems) -> list[_TextRow]:
        """Set `text` of the rows, and return those that can be tokenized.

        Raises OutOfBoundsError, which is added to `problems`.
        """
        filled = fill_in(self._tokenizer, [self._messages(row) for row in rows if row.is_chat])
        good = []
        for row in rows:
            row.text, reason = str(row.prompt), ""
            if row.is_chat:
                try:
                    row.text, reason = next(filled)
                except OutOfBoundsError as error:
                    problems.add(row.row, _template_problem(str(error)))
                    raise
            problem = _template_problem(reason) if reason else _text_problem(row.text)
            if problem:
                problems.add(row.row, problem)
            else:
                good.append(row)
        return good

    def _messages(self, row: _TextRow) -> Any:
        if self._data.allow_special_tokens or not self._special.are_in(row.prompt):
            return row.prompt
        return self._special.hide(row.prompt)

    def _tokenize(self, rows: list[_TextRow]) -> Iterator[tuple[_TextRow, list[int]]]:
        """Yield each row with its token ids, in order, without EOS that the tokenizer appends."""
        encoded: dict[int, list[int]] = {}
        split = not self._data.allow_special_tokens
        for row in rows:
            if row.is_chat and self._special.has_words(row.text):
                encoded[row.row] = self._special.token_ids(row.text)
        for is_chat in (False, True):
            alike = [row for row in rows if row.is_chat is is_chat and row.row not in encoded]
            texts, cut = [row.text for row in alike], 0 if is_chat else self._num_eos
            all_ids = _token_ids(self._tokenizer, texts, not is_chat, split and not is_chat)
            for row, ids in zip(alike, all_ids, strict=True):
                encoded[row.row] = ids[: len(ids) - cut]
        yield from ((row, encoded[row.row]) for row in rows)


def _read_rows(file: str, data: DataConfig, problems: FileProblems) -> Iterator[_TextRow]:
    """Yield the rows of a file whose fields are all valid; the others go to `problems`."""
    for number, row in read_rows(file, problems):
        prompt = look_up(row, data.prompt_key)
        problem = _prompt_problem(prompt)
        if prompt is None:
            rule = f"a row must have a {data.prompt_key!r}, this one has {describe_keys(row)}"
            remedy = "set data.prompt_key to the key of the prompt, or complete the row"
            problem = fault(rule, remedy)
        if problem:
            problems.add(number, problem)
        labels = read_labels(number, row, data, problems)
        if labels and not problem:
            yield _TextRow(number, prompt, *labels)


def _prompt_problem(prompt: Any) -> Problem | None:
    """Return the problem of a prompt that is no list of messages and no usable text, or None."""
    if isinstance(prompt, str):
        return _text_problem(prompt)
    if isinstance(prompt, list) and prompt and all(map(_is_message, prompt)):
        return None
    return fault(f"{RULE}, this one is {shown(prompt)}", "write it as text")


def _text_problem(text: str) -> Problem | None:
    if not text.strip():
        return fault(f"{RULE} and not empty", "complete or remove the row")
    return unicode_problem(text)


def _template_problem(reason: str) -> Problem:
    """Make the problem of messages that the chat template refuses."""
    return fault(
        f"the tokenizer's chat template must accept the messages: {reason}",
        "give the tokenizer's folder a fitting chat template, or write the prompt as text",
    )


def _is_message(message: Any) -> bool:
    """Whether a value has a role, by its form, and a text as content."""
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and bool(ROLE.fullmatch(message["role"]))
        and isinstance(message.get("content"), str)
    )


def read_labels(
    number: int, row: Row, data: DataConfig, problems: FileProblems
) -> tuple[str, str] | None:
    """Return (ground truth, data source) of a row, an absent ground truth as "".

    Returns None where one of them is invalid, which is added to `problems`.
    """
    truth = look_up(row, data.ground_truth_key)
    truth = "" if truth is None else truth
    source = look_up(row, data.data_source_key)
    source = data.default_data_source if source is None else source
    is_truth = isinstance(truth, (str, int, float)) and not isinstance(truth, bool)
    if not is_truth:
        rule = f"a ground truth must be text or a number, this one is {truth!r:.60}"
        problems.add(number, fault(rule, "write it as text"))
    if isinstance(source, str) and source:
        return (str(truth), source) if is_truth else None
    rule = f"a row must name its data source in {data.data_source_key!r}"
    found = "it has none" if source is None else f"this one is {source!r:.60}"
    remedy = "add it to the rows or set data.default_data_source"
    problems.add(number, fault(f"{rule}, {found}", remedy))
    return None


def _token_ids(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], add_special_tokens: bool, split: bool
) -> list[list[int]]:
    """Tokenize texts. split: treat special tokens that a text spells as ordinary text"""
    if not texts:
        return []
    ids: list[list[int]] = tokenizer(
        texts, add_special_tokens=add_special_tokens, split_special_tokens=split
    )["input_ids"]
    return ids


def num_appended_eos(tokenizer: PreTrainedTokenizerBase) -> int:
    """Count the EOS tokens that the tokenizer appends to a text: 0, or 1 for some tokenizers.

    An EOS that the text itself spells does not count.
    """

    def trailing_eos(add_special_tokens: bool) -> int:
        (ids,) = _token_ids(tokenizer, ["a"], add_special_tokens, split=False)
        return len(list(takewhile(lambda i: i == tokenizer.eos_token_id, reversed(ids))))

    return max(trailing_eos(True) - trailing_eos(False), 0)
