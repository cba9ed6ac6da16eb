"""Check the fields of a row of a prompt data set."""

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mindspeed_rlxf.config.enums import OverlongPrompts
from mindspeed_rlxf.config.problems import Problem, shorten_value
from mindspeed_rlxf.config.schema import DataConfig
from mindspeed_rlxf.data.files import (
    FileProblems,
    Row,
    UnusableRow,
    describe_keys,
    fault,
    look_up,
    read_rows,
    unicode_problem,
)
from mindspeed_rlxf.data.prompt_store import STYLE, STYLES, Labels

logger = logging.getLogger(__name__)

ROLE = re.compile(r"[\w .:-]{1,64}")  # a template `<{role}>` makes tokens of other characters
RULE = "a prompt must be text or a list of chat messages {role, content}"
SYSTEM = "system"
EXTRA = "extra_info"


@dataclass
class TextRow:
    """A row of a file before tokenization."""

    row: int  # number in its file, from 1
    prompt: str | list[dict[str, Any]]
    labels: Labels
    # What to tokenize, set later. Of a chat, the filled-in template; special tokens that the
    # messages spell are random words there (see `SpecialTokens`).
    text: str = ""


def read_text_rows(file: str, data: DataConfig, problems: FileProblems) -> Iterator[TextRow]:
    """Yield the rows of a file whose fields are all valid; add those of the others to `problems`.

    Chats without a system message at their start get `data.system_prompt`. Logs a warning for
    columns that `data.extra_columns` names and no row has. Raises UserError for a broken file.
    """
    absent = set(data.extra_columns or ())
    for number, row in read_rows(file):
        if isinstance(row, UnusableRow):
            problems.add(number, row.problem)
            continue
        absent = {key for key in absent if look_up(row, key) is None}
        prompt = look_up(row, data.prompt_key)
        problem = _prompt_problem(prompt, data)
        if prompt is None:
            problem = fault(
                f"a row must have a {data.prompt_key!r}, this one has {describe_keys(row)}",
                "set data.prompt_key to the key of the prompt, or complete the row",
            )
        if problem:
            problems.add(number, problem)
        labels = read_labels(number, row, data, problems)
        if labels and not problem:
            if data.system_prompt is not None and prompt[0]["role"] != SYSTEM:
                prompt = [{"role": SYSTEM, "content": data.system_prompt}, *prompt]
            yield TextRow(number, prompt, labels)
    if absent:
        logger.warning("%s: no row has data.extra_columns=%s", file, sorted(absent))


def _prompt_problem(prompt: Any, data: DataConfig) -> Problem | None:
    if isinstance(prompt, str):
        if data.system_prompt is not None:
            rule = "a prompt must be chat messages with data.system_prompt, this one is text"
            return fault(rule, "write it as [{role: user, content: ...}], or remove the key")
        return text_problem(prompt)
    if isinstance(prompt, list) and prompt:
        found = [
            (m.get("role"), m.get("content")) if isinstance(m, dict) else (0, 0) for m in prompt
        ]
        if all(isinstance(r, str) and ROLE.fullmatch(r) and isinstance(c, str) for r, c in found):
            return None
    return fault(f"{RULE}, this one is {shorten_value(prompt)}", "write it as text")


def text_problem(text: str) -> Problem | None:
    """Return the problem of a prompt that is blank or not valid Unicode; None for others."""
    if not text.strip():
        return fault(f"{RULE} and not empty", "complete or remove the row")
    return unicode_problem(text)


def read_labels(number: int, row: Row, data: DataConfig, problems: FileProblems) -> Labels | None:
    """Return ground truth ("" if absent), data source and extra columns of a row.

    The truth becomes text. An absent data source is `data.default_data_source`. An object
    `extra_info` is replaced by its fields. If any field is invalid, returns None and adds a problem
    for each to `problems` under the row's `number`.
    """
    truth, broken = look_up(row, data.ground_truth_key), list[Problem]()
    if not isinstance(truth, (str, int, float, type(None))) or isinstance(truth, bool):
        rule = f"a ground truth must be text or a number, this one is {truth!r:.60}"
        broken.append(fault(rule, "write it as text"))
    source = look_up(row, data.data_source_key)
    source = data.default_data_source if source is None else source
    if not isinstance(source, str) or not source:
        rule = f"a row must name its data source in {data.data_source_key!r}"
        found = "it has none" if source is None else f"this one is {source!r:.60}"
        remedy = "add it to the rows or set data.default_data_source"
        broken.append(fault(f"{rule}, {found}", remedy))
    named = {data.prompt_key, data.ground_truth_key, data.data_source_key}
    columns = (
        [n for n in row if n not in named] if data.extra_columns is None else data.extra_columns
    )
    values = {key: look_up(row, key) for key in columns}
    extra = {key: value for key, value in values.items() if value is not None}
    if isinstance(extra.get(EXTRA), dict):
        extra |= extra.pop(EXTRA)
    style = look_up(row, f"{STYLE}.style")
    if style is not None:  # kept in any case: it chooses what scores the row
        extra[STYLE] = {**dict(extra.get(STYLE) or {}), "style": style}
    if style not in (*STYLES, None):
        rule = f"{STYLE}.style must be rule or model, this one is {style!r:.60}"
        broken.append(fault(rule, "correct it, or remove it"))
    for problem in broken:
        problems.add(number, problem)
    return None if broken else Labels("" if truth is None else str(truth), str(source), extra)


KEPT = {
    OverlongPrompts.KEEP_HEAD: "first",
    OverlongPrompts.KEEP_TAIL: "last",
    OverlongPrompts.KEEP_ENDS: "first and last",
}
"""Policy that cuts prompts -> which tokens it keeps."""
NO_TOKEN = "a prompt must have a token, the tokenizer makes none of this one"


def cut(token_ids: list[int], max_length: int, policy: OverlongPrompts) -> list[int] | None:
    """Return `max_length` ids of a longer list; None if the policy does not truncate prompts.

    KEEP_HEAD loses the header of a chat's response; KEEP_TAIL may lose the beginning-of-text token.
    KEEP_ENDS keeps the first max_length // 2 ids and the rest from the end.
    """
    if policy not in KEPT:
        return None
    heads = {OverlongPrompts.KEEP_HEAD: max_length, OverlongPrompts.KEEP_ENDS: max_length // 2}
    head = heads.get(policy, 0)
    return token_ids[:head] + token_ids[len(token_ids) - (max_length - head) :]


class LengthLimit:
    """Applies `max_prompt_length` to one file or data set, and counts the prompts over it."""

    def __init__(self, name: str, max_length: int, policy: OverlongPrompts) -> None:
        self._name, self._max_length, self._policy = name, max_length, policy
        self._num_over = 0

    def fit(self, row: int, token_ids: list[int], problems: FileProblems) -> list[int] | None:
        """Return a prompt's ids: unchanged up to the limit, truncated over it; None if not kept.

        Prompts without ids, and with the policy ERROR those over the limit, are added to
        `problems`.
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
        """Log how many of `num_rows` prompts were dropped or truncated, if any.

        Adds a problem of the whole file if all were dropped.
        """
        count = f"{self._num_over} of {num_rows} prompts are over {self._max_length} tokens"
        dropped = self._policy is OverlongPrompts.DROP
        if dropped and self._num_over == num_rows > 0:
            rule = f"{count} and none is left"
            problems.add(0, fault(rule, "raise actor_rollout.max_prompt_length"))
        elif self._num_over:
            done = "dropped" if dropped else f"cut to their {KEPT[self._policy]} {self._max_length}"
            key = f"data.overlong_prompts={self._policy.value}"
            logger.warning("%s: %s and %s (%s)", self._name, count, done, key)
