"""Preprocessing handlers: each decides how rows are read and which columns are written."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError

from mindspeed_rlxf.config.fields import Section
from mindspeed_rlxf.config.problems import Problem, UserError, closest, shorten_value
from mindspeed_rlxf.data.files import describe_keys

LABELS = "labels"
"""Answer column."""

FLAG = "--map-keys"
_PAIRS = "pairs are not preprocessed; examples/reward_model trains on files of pairs"
NO_USE = {
    "tools": "descriptions of tools are not rendered; write them into the system text",
    "kto_tag": "single judged responses are not preprocessed; make pairs of them",
    "chosen": _PAIRS,
    "rejected": _PAIRS,
}
"""The older toolkit's keys for --map-keys that must be empty -> reason."""

Name = Annotated[str, Field(min_length=1)]
Column = Annotated[Name | None, BeforeValidator(lambda column: column or None)]
"""Column name; None or "" = unused. "a.b" is field b of the object a."""


class MapKeys(Section):
    """Column names in alpaca rows."""

    prompt: Name = "instruction"  # text, or a list of chat messages {role, content}
    query: Column = "input"  # text appended to the prompt on a new line
    response: Column = "output"  # text or a number; read only for answers
    history: Column = None  # list of [user, assistant] pairs before the prompt
    system: Column = None


class Tags(Section):
    """Names for keys and roles in sharegpt messages."""

    role_tag: str = "from"
    content_tag: str = "value"
    user_tag: str = "human"
    assistant_tag: str = "gpt"
    observation_tag: str = "observation"
    function_tag: str = "function_call"
    system_tag: str = "system"


class ShareGptKeys(Section):
    """Column names in sharegpt rows."""

    messages: Name = "conversations"  # keys and roles as in `tags`; the last is the answer
    system: Column = None  # text, unless a message has the system role
    tags: Tags = Tags()


Keys = MapKeys | ShareGptKeys


@dataclass(frozen=True)
class Handler:
    """A choice for `--handler-name`."""

    name: str
    keys: type[MapKeys] | type[ShareGptKeys]  # alpaca rows, or sharegpt
    writes_answers: bool  # as text in column LABELS


DEFAULT_HANDLER = "PPOAlpacaStyleInstructionHandler"
HANDLERS: Mapping[str, Handler] = {
    handler.name: handler
    for handler in (
        Handler(DEFAULT_HANDLER, MapKeys, False),
        Handler("R1AlpacaStyleInstructionHandler", MapKeys, True),
        Handler("R1SharegptStyleInstructionHandler", ShareGptKeys, True),
    )
}

_PROMPTS = "only prompts and answers are written; use "
REFUSED_HANDLERS: Mapping[str, str] = {
    "AlpacaStyleInstructionHandler": f"{_PROMPTS}R1AlpacaStyleInstructionHandler",
    "LlamaFactoryInstructionHandler": f"{_PROMPTS}R1AlpacaStyleInstructionHandler",
    "SharegptStyleInstructionHandler": f"{_PROMPTS}R1SharegptStyleInstructionHandler",
    "AlpacaStylePairwiseHandler": f"{_PAIRS}, and {DEFAULT_HANDLER} writes their prompts",
    "SharegptStylePairwiseHandler": _PAIRS,
}
"""The older toolkit's unsupported handlers -> fix."""


def parse_map_keys(text: str, handler: Handler) -> Keys:
    """Parse JSON such as {"prompt": "question", "query": ""}; "" = unused.

    Omitted keys keep their defaults, or become unused if another key names their default column.
    Raises UserError with every problem.
    """
    model = handler.keys
    try:
        columns = json.loads(text)
        if not isinstance(columns, dict):
            raise ValueError("it is no object")
    except ValueError as error:
        example = f'{{"{next(iter(model.model_fields))}": "question", "system": ""}}'
        rule = f"must be a JSON object such as {example}, {text!r} is not ({error})"
        raise UserError(Problem(FLAG, rule, remedy="put it in single quotes")) from error
    for name in {*MapKeys.model_fields, *NO_USE} - model.model_fields.keys():
        if not columns.get(name):
            columns.pop(name, None)
    # A default column named by another key belongs to that key: a column is used once.
    for name, field in model.model_fields.items():
        if field.default in columns.values():
            columns.setdefault(name, None)
    try:
        keys = model.model_validate(columns)
    except ValidationError as error:
        raise UserError([_key_problem(detail, model) for detail in error.errors()]) from error
    if isinstance(keys, MapKeys) and handler.writes_answers and keys.response == keys.prompt:
        rule = f"response and prompt must be different columns for {handler.name}"
        rule = f"{rule}, both are {keys.prompt!r}"
        remedy = "name the column of the answers"
        raise UserError(Problem(FLAG, rule, remedy=remedy, colon=True))
    return keys


def _key_problem(detail: Mapping[str, Any], model: type[Section]) -> Problem:
    *path, name = detail["loc"]
    if detail["type"] != "extra_forbidden":
        kind = 'an object such as {"user_tag": "user"}' if name == "tags" else "a name"
        rule = f"{name}={shorten_value(detail['input'])} must be {kind}"
        return Problem(FLAG, rule, remedy="correct it", colon=True)
    if name in NO_USE:
        return Problem(FLAG, f"{name!r} has no use here: {NO_USE[name]}", colon=True)
    allowed = (Tags if path else model).model_fields
    guess = closest(name, allowed)
    remedy = f"did you mean {guess}?" if guess else "remove it"
    rule = f"{name!r} must be one of {', '.join(allowed)}"
    return Problem(FLAG, rule, remedy=remedy, colon=True)


def missing_columns(
    keys: Keys, handler: Handler, columns: dict[str, None], extra: Iterable[str] = ()
) -> Iterator[Problem]:
    """Yield a problem for each column named by the user but absent from the rows' `columns`.

    Default columns may be absent, and so may the response if the handler writes prompts only.
    `extra` are the columns in --dataset-additional-keys.
    """
    asked = keys.model_dump(exclude_defaults=True, exclude_none=True, exclude={"tags"})
    if not handler.writes_answers:
        asked.pop("response", None)
    rules = [(f"{FLAG}: {key} must name a column", column) for key, column in asked.items()]
    rules += [("--dataset-additional-keys must name columns", column) for column in extra]
    for rule, column in rules:
        if column not in columns and column.split(".")[0] not in columns:
            guess = closest(column, columns)
            absence = f"no row has {column!r} (there are {describe_keys(columns)})"
            remedy = f"did you mean {guess}?" if guess else 'name one, or "" for none'
            yield Problem("", f"{rule}, {absence}", remedy=remedy)
