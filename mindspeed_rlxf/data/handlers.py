"""Handlers of the preprocessing: each sets how rows are read and which columns are written."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import Any

from mindspeed_rlxf.config.problems import Problem, UserError, closest
from mindspeed_rlxf.data.files import describe_keys
from mindspeed_rlxf.data.sidecar import TOKEN_IDS

LABELS = "labels"


class Output(Enum):
    """Content of the data set."""

    PROMPT = "prompt"
    ANSWERED = "answered"  # the prompt, and the answer as text in a column `labels`
    INSTRUCTION = "instruction"  # prompt and responses in one sequence, with labels
    PAIR = "pair"  # prompt and response twice, the better and the worse, each with labels


SEQUENCES: Mapping[Output, tuple[str, ...]] = {
    Output.PROMPT: (TOKEN_IDS,),
    Output.ANSWERED: (TOKEN_IDS,),
    Output.INSTRUCTION: (TOKEN_IDS, LABELS),
    Output.PAIR: ("chosen_input_ids", "chosen_labels", "rejected_input_ids", "rejected_labels"),
}
"""Columns of token ids, first that of the prompts (PAIR: of the better response)."""


FLAG = "--map-keys"
NOT_RENDERED = {
    "tools": "descriptions of tools are not rendered; write them into the system text",
    "kto_tag": "single judged responses are not preprocessed; make pairs of them",
}


@dataclass(frozen=True)
class MapKeys:
    """Names of the columns of alpaca rows; None = unused. "a.b" is field b of the object a."""

    prompt: str = "instruction"  # text, or a list of chat messages {role, content}
    query: str | None = "input"  # text put on a new line under the prompt
    response: str | None = "output"  # text; not read by handlers that write prompts only
    history: str | None = None  # list of [user, assistant] pairs before the prompt
    system: str | None = None
    chosen: str | None = "chosen"
    rejected: str | None = "rejected"


@dataclass(frozen=True)
class Tags:
    """Names of keys and roles in sharegpt messages."""

    role_tag: str = "from"
    content_tag: str = "value"
    user_tag: str = "human"
    assistant_tag: str = "gpt"
    observation_tag: str = "observation"
    function_tag: str = "function_call"
    system_tag: str = "system"


@dataclass(frozen=True)
class ShareGptKeys:
    """Names of the columns of sharegpt rows; None = unused."""

    messages: str = "conversations"  # whose keys and roles `tags` names
    system: str | None = None  # text, if no message is the system's
    chosen: str | None = "chosen"
    rejected: str | None = "rejected"
    tags: Tags = field(default_factory=Tags)


Keys = MapKeys | ShareGptKeys


@dataclass(frozen=True)
class Handler:
    """A choice of `--handler-name`."""

    name: str
    keys: type[MapKeys] | type[ShareGptKeys]  # alpaca rows with a column for each part, or sharegpt
    output: Output

    @property
    def sequences(self) -> tuple[str, ...]:
        return SEQUENCES[self.output]

    @property
    def has_responses(self) -> bool:
        return self.output in (Output.INSTRUCTION, Output.PAIR)


HANDLERS: Mapping[str, Handler] = {
    handler.name: handler
    for handler in (
        Handler("PPOAlpacaStyleInstructionHandler", MapKeys, Output.PROMPT),
        Handler("R1AlpacaStyleInstructionHandler", MapKeys, Output.ANSWERED),
        Handler("R1SharegptStyleInstructionHandler", ShareGptKeys, Output.ANSWERED),
        Handler("AlpacaStyleInstructionHandler", MapKeys, Output.INSTRUCTION),
        Handler("LlamaFactoryInstructionHandler", MapKeys, Output.INSTRUCTION),
        Handler("SharegptStyleInstructionHandler", ShareGptKeys, Output.INSTRUCTION),
        Handler("AlpacaStylePairwiseHandler", MapKeys, Output.PAIR),
        Handler("SharegptStylePairwiseHandler", ShareGptKeys, Output.PAIR),
    )
}
DEFAULT_HANDLER = "PPOAlpacaStyleInstructionHandler"

_PRETRAIN = "texts for pre-training are not preprocessed here; use the tools of Megatron-LM"
_OWN_FORMAT = (
    "rewrite the rows as alpaca or sharegpt rows and use AlpacaStyleInstructionHandler or "
    "SharegptStyleInstructionHandler"
)
REFUSED_HANDLERS: Mapping[str, str] = {
    "GeneralPretrainHandler": _PRETRAIN,
    "AlpacaPretrainHandler": _PRETRAIN,
    "AlpacaStyleProcessRewardHandler": "rewards of single steps are not trained here; score whole "
    "responses and use AlpacaStylePairwiseHandler",
    "HunyuanInstructionHandler": "models of this family cannot be loaded; use "
    "SharegptStyleInstructionHandler with the template of a family that can",
    **dict.fromkeys(
        (
            "GeneralInstructionHandler",
            "BelleMultiTurnInstructionHandler",
            "MOSSInstructionHandler",
            "MOSSMultiTurnHandler",
            "LeetcodePythonInstructionHandler",
            "StackOverflowPythonPretrainHandler",
        ),
        _OWN_FORMAT,
    ),
}
"""Handlers of the older toolkit that are not supported -> remedy."""


def parse_map_keys(text: str, handler: Handler) -> Keys:
    """Parse JSON such as {"prompt": "question", "query": ""}; "" = unused.

    Keys that are not given keep their defaults, or become unused if another key names their default
    column. Raises UserError with every problem.
    """
    defaults = handler.keys()
    try:
        given = json.loads(text)
        if not isinstance(given, dict):
            raise ValueError("it is no object")
    except ValueError as error:
        example = f'{{"{fields(defaults)[0].name}": "question", "system": ""}}'
        rule = f"must be a JSON object such as {example}, {text!r} is not ({error})"
        raise UserError(Problem(FLAG, rule, remedy="put it in single quotes")) from error
    problems = [p for key, value in given.items() for p in _key_problems(key, value, handler)]
    if problems:
        raise UserError(problems)
    columns: dict[str, Any] = {
        k: column or None for k, column in given.items() if hasattr(defaults, k)
    }
    if "tags" in columns:
        columns["tags"] = Tags(**(columns["tags"] or {}))
    # A default column that another key names belongs to that key, as it must be used only once.
    for key, default in asdict(defaults).items():
        if key not in columns and default in columns.values():
            columns[key] = None
    keys = type(defaults)(**columns)
    if problems := list(_column_problems(keys, handler)):
        raise UserError(problems)
    return keys


def missing_columns(
    keys: Keys, handler: Handler, columns: dict[str, None], extra: Iterable[str] = ()
) -> Iterator[Problem]:
    """Yield a problem for each column that the user named and that no row has.

    Columns equal to the default may be absent, and so may the response of a handler that writes
    prompts only. `columns` are those of the rows, `extra` those of --dataset-additional-keys.
    """
    defaults = asdict(handler.keys())
    asked = {k: v for k, v in asdict(keys).items() if isinstance(v, str) and v != defaults[k]}
    if handler.output is Output.PROMPT:
        asked.pop("response", None)
    named = [(f"{FLAG}: {key} must name a column", column) for key, column in asked.items()]
    named += [("--dataset-additional-keys must name columns", column) for column in extra]
    for rule, column in named:
        if column not in columns and column.split(".")[0] not in columns:
            guess = closest(column, columns)
            found = f"no row has {column!r} (there are {describe_keys(columns)})"
            remedy = f"did you mean {guess}?" if guess else 'name one, or "" for none'
            yield Problem("", f"{rule}, {found}", remedy=remedy)


def _flag_problem(rule: str, remedy: str) -> Problem:
    return Problem(FLAG, rule, remedy=remedy, colon=True)


def _key_problems(key: str, value: Any, handler: Handler) -> Iterator[Problem]:
    """Yield the problems of one key of --map-keys; keys without a use here may be empty."""
    unused = ("response",) if handler.output is Output.PAIR else ("chosen", "rejected")
    known = [each.name for each in fields(handler.keys()) if each.name not in unused]
    given = {key: value}
    if key == "tags" in known and isinstance(value or {}, dict):
        known, given = list(Tags.__dataclass_fields__), value or {}
    for name, word in given.items():
        if name in known:
            if not isinstance(word or "", str) or name == "tags":
                kind = 'an object such as {"user_tag": "user"}' if name == "tags" else "a text"
                yield _flag_problem(f"{name}={word!r} must be {kind}", "correct it")
        elif name in NOT_RENDERED and word:
            yield _flag_problem(f"{name!r} has no use here: {NOT_RENDERED[name]}", "")
        elif word or name not in {*MapKeys.__dataclass_fields__, *NOT_RENDERED}:
            guess = closest(name, known)
            remedy = f"did you mean {guess}?" if guess else "remove it"
            yield _flag_problem(f"{name!r} must be one of {', '.join(known)}", remedy)


def _column_problems(keys: Keys, handler: Handler) -> Iterator[Problem]:
    """Yield a problem for each needed key without a column, and for answers that are the prompt."""
    needed = {Output.PAIR: ("chosen", "rejected"), Output.INSTRUCTION: ("response",)}
    for key in (fields(keys)[0].name, *needed.get(handler.output, ())):
        if getattr(keys, key, "messages") is None:
            rule = f"{key} must name a column for {handler.name}, it has none"
            yield _flag_problem(rule, f"name it, or make prompts alone with {DEFAULT_HANDLER}")
    answered = handler.output in (Output.ANSWERED, Output.INSTRUCTION)
    if isinstance(keys, MapKeys) and answered and keys.response == keys.prompt:
        rule = f"response and prompt must be different columns for {handler.name}"
        yield _flag_problem(f"{rule}, both are {keys.prompt!r}", "name the column of the answers")
