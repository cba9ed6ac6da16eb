"""Rows of prompt files before tokenization: their prompt and labels, or what is wrong with them."""

import json
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from mindspeed_rlxf.config.problems import Problem, shorten_value
from mindspeed_rlxf.config.reward_section import STRUCTURED
from mindspeed_rlxf.config.schema import DataConfig
from mindspeed_rlxf.data.files import (
    FileProblems,
    Row,
    UnusableRow,
    as_text,
    describe_absence,
    fault,
    look_up,
    number_text,
    read_rows,
    unicode_problem,
)
from mindspeed_rlxf.data.prompt_store import STYLE, STYLES, Labels

logger = logging.getLogger(__name__)

ROLE = re.compile(r"[\w .:-]{1,64}")  # other characters could form tokens in a template `<{role}>`
RULE = "a prompt must be text or a list of chat messages {role, content}"
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
