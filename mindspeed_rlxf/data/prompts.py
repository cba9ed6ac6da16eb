"""Load prompt data sets: tokenize rows from files, or report every problem in one list."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

from mindspeed_rlxf.config.enums import OverlongPrompts
from mindspeed_rlxf.config.problems import Problem, UserError, shorten_value
from mindspeed_rlxf.config.reward_section import STRUCTURED
from mindspeed_rlxf.config.schema import DataConfig
from mindspeed_rlxf.data.decoding import decode
from mindspeed_rlxf.data.files import (
    FileProblems,
    Row,
    UnusableRow,
    as_text,
    describe_absence,
    empty_file,
    fault,
    look_up,
    number_text,
    read_rows,
    unicode_problem,
)
from mindspeed_rlxf.data.prompt_store import STYLE, STYLES, Labels, Prompt, PromptStore
from mindspeed_rlxf.data.template_dates import template_arguments
from mindspeed_rlxf.data.tokenizer import SpecialTokens, begin_once, prepended_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Prompt", "encode_prompts", "load_prompts", "num_appended_eos"]
logger = logging.getLogger(__name__)

ENCODE_CHUNK = 1024  # texts per tokenizer call; fast tokenizers share a call between threads
ROLE = re.compile(r"[\w .:-]{1,64}")  # other characters could form tokens in a template `<{role}>`
RULE = "a prompt must be text or a list of chat messages {role, content}"
NO_TOKEN = "a prompt must have a token, the tokenizer makes none of this one"
SYSTEM = "system"
WITHOUT_EFFECT = ("tools", "agent_name")  # columns that other toolkits read
MEDIA = ("images", "videos", "audios")
ANSWERS = ("assistant", "model", "gpt", "bot")  # roles of a response
WITHOUT_ANSWER = "take the answer out of it"
EXTRA = "extra_info"
OF_AGENTS = ("agent_name", "tools_kwargs", f"{EXTRA}.tools_kwargs")
"""Columns that agents read, whatever `data.extra_columns` names."""
GivesFirst: TypeAlias = Callable[[Mapping[str, Any]], bool]
"""Other columns of a row -> whether its agent gives something before the first turn."""
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
        prompts.end_part()
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
        settings = {"tokenize": False, "add_generation_prompt": is_opened, **self._arguments}
        try:
            return str(self._tokenizer.apply_chat_template(messages, **settings))
        except Exception:  # any type: a template is a program
            joined = _join_system(messages)
            if joined is None:
                raise
            text = str(self._tokenizer.apply_chat_template(joined, **settings))
        if not self._has_joined:
            logger.warning("the chat template refuses system messages: they join the user's first")
        self._has_joined = True
        return text

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


@dataclass
class TextRow:
    """A row before tokenization."""

    row: int  # number in its file, from 1
    prompt: str | list[dict[str, Any]]
    labels: Labels
    # What to tokenize, set later: for a chat, the rendered template, with random words in place of
    # special tokens spelled by the messages (see `SpecialTokens`).
    text: str = ""


def read_text_rows(
    file: str, data: DataConfig, problems: FileProblems, gives_first: GivesFirst | None = None
) -> Iterator[TextRow]:
    """Yield a file's valid rows; add the problems of the others to `problems`.

    Chats without a leading system message get `data.system_prompt`. Warns about columns named in
    `data.extra_columns` but absent from all rows, and about columns of other toolkits that change
    nothing here. Raises UserError for a broken file.
    """
    absent = set(data.extra_columns or ())
    without_effect: set[str] = set()
    for number, row in read_rows(file):
        if isinstance(row, UnusableRow):
            problems.add(number, row.problem)
            continue
        absent = {key for key in absent if look_up(row, key) is None}
        without_effect.update(name for name in WITHOUT_EFFECT if row.get(name))
        prompt = read_messages(look_up(row, data.prompt_key))
        problem = _prompt_problem(prompt, data) or media_problem(row, data.extra_columns or ())
        if prompt is None:
            problem = fault(
                f"a row must have a {data.prompt_key!r}, {describe_absence(row, data.prompt_key)}",
                "set data.prompt_key to the key of the prompt, or complete the row",
            )
        if problem:
            problems.add(number, problem)
        labels = read_labels(number, row, data, problems)
        if labels and not problem:
            if isinstance(prompt, list):
                prompt = [_without_nulls(message) for message in prompt]
            if data.system_prompt is not None and prompt[0]["role"] != SYSTEM:
                prompt = [{"role": SYSTEM, "content": data.system_prompt}, *prompt]
            yield TextRow(number, prompt, labels)
    if absent:
        logger.warning("%s: no row has data.extra_columns=%s", file, sorted(absent))
    if without_effect and gives_first is None:
        rule = (
            "%s: the columns %s change no prompt and call no tool; only reward functions get them"
        )
        logger.warning(rule, file, ", ".join(sorted(without_effect)))


def read_messages(value: Any) -> Any:
    """Return the chat messages in a JSON text of such, as some files have them; else the value."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        messages = json.loads(value)
    except (ValueError, RecursionError):
        return value
    if not isinstance(messages, list) or not messages:
        return value
    for message in messages:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            return value
    return messages


def _without_nulls(message: dict[str, Any]) -> dict[str, Any]:
    """Return a chat message without the keys that Parquet adds, as every message has all keys."""
    return {key: value for key, value in message.items() if value is not None}


def media_problem(row: Row, of_reward: Collection[str] = ()) -> Problem | None:
    """Return a problem for a row with images or the like, except in columns of the reward."""
    columns = [name for name in MEDIA if row.get(name) and name not in of_reward]
    if not columns:
        return None
    rule = f"a prompt must be text alone, this one has {', '.join(columns)}"
    remedy = "remove the row or the column, or name it in data.extra_columns, for the reward alone"
    return fault(rule, remedy)


def _prompt_problem(prompt: Any, data: DataConfig) -> Problem | None:
    if isinstance(prompt, str):
        if data.system_prompt is not None:
            rule = "a prompt must be chat messages with data.system_prompt, this one is text"
            return fault(rule, "write it as [{role: user, content: ...}], or remove the key")
        return text_problem(prompt)
    is_chat = isinstance(prompt, list) and all(_is_message(message) for message in prompt)
    if not is_chat or not prompt:
        return fault(f"{RULE}, this one is {shorten_value(prompt)}", "write it as text")
    last_role = prompt[-1]["role"]
    if last_role.lower() in ANSWERS:  # the template would open another response behind it
        return fault(last_message_rule(last_role, "user"), WITHOUT_ANSWER)
    return None


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict):
        return False
    role = message.get("role")
    is_role = isinstance(role, str) and ROLE.fullmatch(role) is not None
    return is_role and isinstance(message.get("content"), str)


def last_message_rule(role: str, expected_role: str) -> str:
    """Return the rule broken by a chat whose last message is not of the expected role."""
    return f"the last message must be of the {expected_role}, it is of the {role}"


def text_problem(text: str) -> Problem | None:
    """Return a problem for a prompt that is blank or invalid Unicode."""
    if not text.strip():
        return fault(f"{RULE} and not empty", "complete or remove the row")
    return unicode_problem(text)


def read_labels(number: int, row: Row, data: DataConfig, problems: FileProblems) -> Labels | None:
    """Return a row's ground truth ("" if absent) as text, data source and extra columns.

    A list or an object becomes JSON; functions get it as it is (STRUCTURED).

    `data.default_data_source` replaces an absent data source, and its own fields replace an object
    `extra_info`. If any field is invalid, returns None and adds a problem for each to `problems`
    under the row's `number`.
    """
    row_problems: list[Problem] = []
    truth = look_up(row, data.ground_truth_key)
    kinds = (str, int, float, dict, list, type(None))
    if not isinstance(truth, kinds) or isinstance(truth, bool):
        rule = f"a ground truth must be text, a number, list or object, this one is {truth!r:.60}"
        row_problems.append(fault(rule, "write it as text"))
    source = look_up(row, data.data_source_key)
    if source is None:
        source = data.default_data_source
    if not isinstance(source, str) or not source:
        rule = f"a row must name its data source in {data.data_source_key!r}"
        rule += ", it has none" if source is None else f", this one is {source!r:.60}"
        remedy = "add it to the rows or set data.default_data_source"
        row_problems.append(fault(rule, remedy))
    columns = data.extra_columns
    if columns is None:
        named_columns = {data.prompt_key, data.ground_truth_key, data.data_source_key}
        columns = tuple(name for name in row if name not in named_columns)
    extra: dict[str, Any] = {}
    for key in columns:
        value = look_up(row, key)
        if value is not None:
            extra[key] = value
    if isinstance(extra.get(EXTRA), dict):
        extra |= extra.pop(EXTRA)
    for key in OF_AGENTS:
        value = look_up(row, key)
        if value is not None:
            extra.setdefault(key.rpartition(".")[2], value)
    if isinstance(truth, (dict, list)):
        extra[STRUCTURED] = truth
        truth = json.dumps(truth, default=as_text, ensure_ascii=False)
    style = look_up(row, f"{STYLE}.style")
    if style is not None:  # always kept: it chooses what scores the row
        extra[STYLE] = {**dict(extra.get(STYLE) or {}), "style": style}
    if style not in (*STYLES, None):
        rule = f"{STYLE}.style must be rule or model, this one is {style!r:.60}"
        row_problems.append(fault(rule, "correct it, or remove it"))
    for problem in row_problems:
        problems.add(number, problem)
    if row_problems:
        return None
    return Labels("" if truth is None else number_text(truth), str(source), extra)


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
                effect = f"cut to their {TOKENS_KEPT[self._policy]} {self._max_length}"
            key = f"data.overlong_prompts={self._policy.value}"
            logger.warning("%s: %s and %s (%s)", self._name, count, effect, key)
