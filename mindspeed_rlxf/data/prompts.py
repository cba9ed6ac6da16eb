"""Load prompt data sets: tokenize rows from files, or report every problem in one list."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from mindspeed_rlxf.config.enums import OverlongPrompts
from mindspeed_rlxf.config.problems import Problem, UserError
from mindspeed_rlxf.config.schema import DataConfig
from mindspeed_rlxf.data.decoding import decode
from mindspeed_rlxf.data.files import (
    FileProblems,
    empty_file,
    fault,
)
from mindspeed_rlxf.data.prompt_store import Labels, Prompt, PromptStore
from mindspeed_rlxf.data.template_dates import template_arguments
from mindspeed_rlxf.data.text_rows import SYSTEM, GivesFirst, TextRow, read_text_rows, text_problem
from mindspeed_rlxf.data.tokenizer import SpecialTokens, begin_once, prepended_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Prompt", "encode_prompts", "load_prompts", "num_appended_eos"]
logger = logging.getLogger(__name__)

ENCODE_CHUNK = 1024  # texts per tokenizer call; fast tokenizers share a call between threads
NO_TOKEN = "a prompt must have a token, the tokenizer makes none of this one"
TOKENS_KEPT = {
    OverlongPrompts.KEEP_HEAD: "first",
    OverlongPrompts.KEEP_TAIL: "last",
    OverlongPrompts.KEEP_ENDS: "first and last",
}
"""Truncating policy -> the tokens it keeps."""


def load_prompts(
    files: str | Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    max_prompt_length: int,
    keep_messages: bool = False,
    gives_first: GivesFirst | None = None,
) -> PromptStore:
    """Load all prompts from `files`, in order; no files give no prompts.

    A prompt is a string, tokenized as `tokenizer(text, add_special_tokens=True)` without the EOS
    some tokenizers append, or a list of chat messages, rendered by the tokenizer's chat template
    with the generation prompt. Special tokens spelled in rows are read as text unless
    `data.allow_special_tokens`; those written by the template are tokens. Prompts above
    `max_prompt_length` tokens follow `data.overlong_prompts`. With `data.invalid_rows=drop`, bad
    rows are dropped if their file is readable and keeps a row. The log counts both. With
    `keep_messages` chats are kept for a reward or an agent that reads them. `gives_first` is for
    runs with agents: chats whose agent gives something first end before the generation prompt.

    Raises:
        UserError: the problems in all files.
    """
    names = [files] if isinstance(files, str) else list(files)
    reader = _Reader(tokenizer, data, max_prompt_length, keep_messages, gives_first)
    problems: list[Problem] = []
    prompts = PromptStore()
    for name in names:
        rows_with_problems = FileProblems(name)
        num_before = len(prompts)
        file_problems: list[Problem] = []
        try:
            for labels, text, token_ids in reader.read(name, rows_with_problems):
                prompts.add(text, token_ids, labels)
        except UserError as error:
            file_problems = list(error.problems)
        prompts.end_file()
        num_kept = len(prompts) - num_before
        row_problems = rows_with_problems.list_problems()
        if not (row_problems or file_problems or num_kept):
            file_problems = [empty_file(name)]
        drops_rows = data.invalid_rows == "drop" and num_kept > 0 and not file_problems
        if row_problems and drops_rows:
            for problem in row_problems:
                logger.warning("dropped: %s", problem)
            num_dropped = rows_with_problems.count_rows()
            logger.warning("%s: %d rows dropped (data.invalid_rows=drop)", name, num_dropped)
            continue
        problems += row_problems + file_problems
    if problems:
        raise UserError(problems)
    return prompts


def encode_prompts(
    prompts: Sequence[str | list[dict[str, Any]]],
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
) -> list[tuple[str, list[int]]]:
    """Return (text, token ids) of each string or chat, as `load_prompts` reads those of rows.

    Raises:
        UserError: A string is blank, or the chat template does not accept the messages.
    """
    reader = _Reader(tokenizer, data, 0, False)
    rows = [TextRow(number, prompt, Labels("", "")) for number, prompt in enumerate(prompts, 1)]
    return reader.encode(rows)


class _Reader:
    """Tokenizes prompts, a chunk of rows at a time."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        max_prompt_length: int,
        keep_messages: bool,
        gives_first: GivesFirst | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._data = data
        self._max_length = max_prompt_length
        self._keep_messages = keep_messages
        self._gives_first = gives_first
        self._num_eos = num_appended_eos(tokenizer)
        self._start = prepended_ids(tokenizer)
        self._special = SpecialTokens(tokenizer)
        self._arguments = template_arguments(tokenizer, data)
        self._has_joined = False  # whether a system message was joined to a user's

    def read(self, file: str, problems: FileProblems) -> Iterator[tuple[Labels, str, list[int]]]:
        """Yield (labels, text, token ids) for each kept prompt; add invalid rows to `problems`.

        A truncated prompt's text is decoded from the remaining ids.
        """
        limit = LengthLimit(file, self._max_length, self._data.overlong_prompts)
        rows = read_text_rows(file, self._data, problems, self._gives_first)
        num_rows = 0
        num_spelled = 0  # prompts with the spelling of a special token
        while True:
            chunk = list(islice(rows, ENCODE_CHUNK))
            if not chunk:
                break
            num_rows += len(chunk)
            valid_rows: list[TextRow] = []
            for row in chunk:
                if not self._data.allow_special_tokens:
                    num_spelled += self._special.hide(row.prompt) != row.prompt
                problem = self._fill_template(row)
                if problem is not None:
                    problems.add(row.row, problem)
                else:
                    valid_rows.append(row)
            for row, token_ids in zip(valid_rows, self._tokenize(valid_rows), strict=True):
                fitting_ids = limit.fit(row.row, token_ids, problems)
                labels = row.labels
                if self._keep_messages and isinstance(row.prompt, list):
                    labels = replace(labels, messages=row.prompt)
                if fitting_ids is token_ids:
                    yield labels, self._special.restore(row.text), token_ids
                elif fitting_ids is not None:  # truncated
                    yield labels, decode(self._tokenizer, fitting_ids), fitting_ids
        limit.report(num_rows, problems)
        if num_spelled:
            logger.warning(
                "%s: %d of %d prompts spell special tokens of the tokenizer, which are read as "
                "text; data.allow_special_tokens=true reads them as tokens",
                file,
                num_spelled,
                num_rows,
            )

    def encode(self, rows: list[TextRow]) -> list[tuple[str, list[int]]]:
        """Return (text, token ids) of each row; UserError if one cannot be tokenized."""
        problems = []
        for row in rows:
            problem = self._fill_template(row)
            if problem is not None:
                problems.append(problem)
        if problems:
            raise UserError(problems)
        texts = [self._special.restore(row.text) for row in rows]
        return list(zip(texts, self._tokenize(rows), strict=True))

    def _fill_template(self, row: TextRow) -> Problem | None:
        """Set the row's `text`; return a problem if it cannot be tokenized."""
        row.text = str(row.prompt)
        if isinstance(row.prompt, list):
            messages: Any = row.prompt
            if not self._data.allow_special_tokens:
                messages = self._special.hide(messages)
            try:
                is_opened = self._gives_first is None or not self._gives_first(
                    row.labels.extra_info
                )
                row.text = self._render(messages, is_opened)
            except Exception as error:  # any type: a template is a program
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                remedy = "give the tokenizer's folder a fitting one, or write the prompt as text"
                rule = f"the tokenizer's chat template must accept the messages: {reason}"
                return fault(rule, remedy)
        return text_problem(row.text)

    def _render(self, messages: list[dict[str, Any]], is_opened: bool) -> str:
        """Render a chat, with the header of the answer if `is_opened`.

        A system message that the template refuses joins the user's first one.
        """
        try:
            return self._apply_template(messages, is_opened)
        except Exception:  # any type: a template is a program
            joined = _join_system(messages)
            if joined is None:
                raise
            text = self._apply_template(joined, is_opened)
        if not self._has_joined:
            logger.warning("the chat template refuses system messages: they join the user's first")
        self._has_joined = True
        return text

    def _apply_template(self, messages: list[dict[str, Any]], is_opened: bool) -> str:
        settings = {"tokenize": False, **self._arguments}
        apply = self._tokenizer.apply_chat_template
        opened = str(apply(messages, add_generation_prompt=True, **settings))
        if is_opened:
            return opened
        text = str(apply(messages, add_generation_prompt=False, **settings))
        if opened.startswith(text):
            return text
        return text.removesuffix(self._tokenizer.eos_token or "")  # Phi 3 ends chats with an EOS

    def _tokenize(self, rows: list[TextRow]) -> list[list[int]]:
        """Return each row's token ids, without an EOS appended by the tokenizer."""
        encoded: dict[int, list[int]] = {}
        for is_chat in (False, True):
            rows_of_kind = [row for row in rows if isinstance(row.prompt, list) is is_chat]
            split = not (self._data.allow_special_tokens or is_chat)
            num_eos = 0 if is_chat else self._num_eos
            texts = [row.text for row in rows_of_kind]
            all_ids = _token_ids(self._tokenizer, texts, not is_chat, split)
            for row, ids in zip(rows_of_kind, all_ids, strict=True):
                encoded[row.row] = ids[: len(ids) - num_eos]
                if not (is_chat or split):  # a text may have its own BOS
                    encoded[row.row] = begin_once(encoded[row.row], self._start)
                if is_chat and self._special.restore(row.text) != row.text:
                    encoded[row.row] = self._special.token_ids(row.text)
        return [encoded[row.row] for row in rows]


def _join_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Return a chat whose system message begins the user's first one; None without both."""
    if [message["role"] for message in messages[:2]] != [SYSTEM, "user"]:
        return None
    system, user, *others = messages
    return [{**user, "content": f"{system['content']}\n\n{user['content']}"}, *others]


def _token_ids(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], add_special_tokens: bool, split: bool
) -> list[list[int]]:
    if not texts:
        return []
    ids: list[list[int]] = tokenizer(
        texts, add_special_tokens=add_special_tokens, split_special_tokens=split
    )["input_ids"]
    return ids


def num_appended_eos(tokenizer: PreTrainedTokenizerBase) -> int:
    """Count the EOS tokens appended to a text by the tokenizer: 0, or 1 for some tokenizers."""
    (plain,) = _token_ids(tokenizer, ["a"], add_special_tokens=False, split=False)
    (framed,) = _token_ids(tokenizer, ["a"], add_special_tokens=True, split=False)
    return int(framed[-1:] == [tokenizer.eos_token_id] != plain[-1:])


def cut(token_ids: list[int], max_length: int, policy: OverlongPrompts) -> list[int] | None:
    """Return `max_length` ids of a longer list; None if the policy does not truncate.

    KEEP_HEAD loses the header of a chat's response; KEEP_TAIL may lose the beginning-of-text token.
    KEEP_ENDS keeps the first max_length // 2 ids and the rest from the end.
    """
    if policy is OverlongPrompts.KEEP_HEAD:
        return token_ids[:max_length]
    if policy is OverlongPrompts.KEEP_TAIL:
        return token_ids[len(token_ids) - max_length :]
    if policy is OverlongPrompts.KEEP_ENDS:
        head_length = max_length // 2
        tail_length = max_length - head_length
        return token_ids[:head_length] + token_ids[len(token_ids) - tail_length :]
    return None


class LengthLimit:
    """Applies `max_prompt_length` to one file or data set, and counts the prompts above it."""

    def __init__(self, name: str, max_length: int, policy: OverlongPrompts) -> None:
        self._name = name
        self._max_length = max_length
        self._policy = policy
        self._num_over = 0

    def fit(self, row: int, token_ids: list[int], problems: FileProblems) -> list[int] | None:
        """Return a prompt's ids, truncated if above the limit; None if dropped.

        Prompts without ids and, with policy ERROR, those above the limit are added to `problems`.
        """
        length = len(token_ids)
        if length == 0:
            problems.add(row, fault(NO_TOKEN, "remove the row"))
            return None
        if length <= self._max_length:
            return token_ids
        if self._policy is OverlongPrompts.ERROR:
            limit = f"actor_rollout.max_prompt_length={self._max_length}"
            rule = f"a prompt must fit {limit}, this one has {length} tokens"
            problems.add(row, fault(rule, "raise it or set data.overlong_prompts=drop"))
            return None
        self._num_over += 1
        return cut(token_ids, self._max_length, self._policy)

    def report(self, num_rows: int, problems: FileProblems) -> None:
        """Log how many prompts were dropped or truncated; it is a problem if none is left."""
        count = f"{self._num_over} of {num_rows} prompts are over {self._max_length} tokens"
        drops = self._policy is OverlongPrompts.DROP
        if drops and self._num_over == num_rows > 0:
            rule = f"{count} and none is left"
            problems.add(0, fault(rule, "raise actor_rollout.max_prompt_length"))
        elif self._num_over:
            effect = "dropped"
            if not drops:
                effect = f"truncated to their {TOKENS_KEPT[self._policy]} {self._max_length}"
            key = f"data.overlong_prompts={self._policy.value}"
            logger.warning("%s: %s and %s (%s)", self._name, count, effect, key)
