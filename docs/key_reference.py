"""Make `docs/configuration.md` from the schema, and the tables in `docs/migrating.md`.

`python -m docs.key_reference docs/configuration.md docs/migrating.md` writes them,
as `make docs` does. `docs/migrating.md` keeps its text above MARK.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mindspeed_rlxf.compat.mindspeed_llm.keys import ANY, NO_OP_LIST, REFUSED_LIST
from mindspeed_rlxf.compat.mindspeed_llm.translate import MOVED
from mindspeed_rlxf.compat.verl.table import RENAMED, TABLE
from mindspeed_rlxf.config.enums import CONFIGURED, Role
from mindspeed_rlxf.config.fields import extra_of, key
from mindspeed_rlxf.config.keys import PLAIN_SECTIONS, ROLE_SECTIONS, Tree
from mindspeed_rlxf.config.problems import format_value
from mindspeed_rlxf.config.schema import (
    ArchitectureConfig,
    FunctionConfig,
    KlControlConfig,
    LoraConfig,
    OffloadConfig,
    OptimizerConfig,
    PoolSettings,
    RoleConfig,
    RunConfig,
    SandboxConfig,
    TrainingConfig,
    VllmConfig,
)

HEAD = """\
# Configuration reference

<!-- Made by: python -m docs.key_reference docs/configuration.md -->

Every key of the YAML. [Configuring and running](running.md) says how files and the command line are
put together. An unknown key is an error that names the nearest known one.

The column "resume" says what happens when a run is resumed with another value of the key:

| word | meaning |
| --- | --- |
| fixed | the run is refused; `training.new_run=true` starts a new one |
| reshard | allowed; the layout changes, so results agree within rounding, not bit by bit |
| free | allowed, and logged |
"""

MARK = "<!-- Everything below is made by: python -m docs.key_reference -->"

POOL = key(
    ..., "processes of the pool of that name: a count, or a list with one for each node", "reshard"
)
REWARD_POOL = "its pool; absent with reward.kind=rule = that of the actor, or of ref if it is split"
WORDS = {
    bool: "`true`, `false`",
    int: "integer",
    float: "number",
    str: "string",
    dict: "mapping",
    Any: "any value",
    NoneType: "`null`",
}
PLURALS = {"integer": "integers", "number": "numbers", "string": "strings", "mapping": "mappings"}
LIMITS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def document() -> str:
    """Return the page `docs/configuration.md`: HEAD, then a table per section."""
    head = "key | type | default | meaning | resume"
    tables = (
        f"## `{title}`\n\n" + make_table(head, [_row(*field) for field in keys.items()])
        for title, keys in sections().items()
    )
    return "\n".join((HEAD, "\n\n".join(tables))) + "\n"


def sections() -> dict[str, dict[str, FieldInfo]]:
    """Map each table's title to its fields, in page order.

    Keys shared by several roles have their own table; a role without other keys has none.
    """
    elsewhere = {*OptimizerConfig.model_fields, "architecture", "offload", "lora", "sandbox"}
    shared = {name: (f.description, _resume(f)) for name, f in RoleConfig.model_fields.items()}
    own = {
        role.value: {
            name: field
            for name, field in schema.model_fields.items()
            if name not in elsewhere and shared.get(name) != (field.description, _resume(field))
        }
        for role, schema in ROLE_SECTIONS.items()
    }
    plain = {name: dict(schema.model_fields) for name, schema in PLAIN_SECTIONS.items()}
    del plain["algorithm"]["kl_ctrl"], plain["rollout"]["vllm"]
    pools = {role: REWARD_POOL if role is Role.REWARD else "its pool" for role in CONFIGURED}
    every = {k: f for k, f in RoleConfig.model_fields.items() if k not in elsewhere}
    return {
        "training": dict(TrainingConfig.model_fields),
        "every role": every,
        "every role: offload": dict(OffloadConfig.model_fields),
        "actor_rollout, critic: optimizer": dict(OptimizerConfig.model_fields),
        "actor_rollout, critic: lora": dict(LoraConfig.model_fields),
        **{name: keys for name, keys in own.items() if keys},
        "reward.function": dict(FunctionConfig.model_fields),
        "reward.sandbox": dict(SandboxConfig.model_fields),
        "model.<name>": dict(ArchitectureConfig.model_fields),
        "algorithm": plain.pop("algorithm"),
        "algorithm.kl_ctrl": dict(KlControlConfig.model_fields),
        **plain,
        "rollout.vllm": dict(VllmConfig.model_fields),
        "placement": {role.value: key(role.value, text, "reshard") for role, text in pools.items()},
        "resource_pool": {"<pool>": POOL, **PoolSettings.model_fields},
        "the top level": {"dry_run": RunConfig.model_fields["dry_run"]},
    }


def make_table(head: str, rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; `head` has titles with " | " between them."""
    columns = head.split(" | ")
    cells = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    lines = [columns, ["---"] * len(columns), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def quote_values(values: Iterable[Any]) -> str:
    """Return values as in YAML, each in backticks, separated by commas."""
    texts = (value if isinstance(value, str) else format_value(value) for value in values)
    return ", ".join(f"`{text}`" for text in texts).replace("`()`", "`[]`")


def _row(name: str, field: FieldInfo) -> list[str]:
    """Return a key's row; with several types the first has the limits, as `integer >= 1 or A`."""
    first, *others = dict.fromkeys(_kinds(field.annotation))
    bounds = [
        f"{sign} {value}"
        for part in field.metadata
        for limit, sign in LIMITS.items()
        if (value := getattr(part, limit, None)) is not None
    ]
    kind = " or ".join((f"{first} {', '.join(bounds)}".rstrip(), *others))
    meaning = field.description or ""
    default: Any = getattr(field.default, "value", field.default)
    shown = "a list" if isinstance(default, tuple) and default else quote_values([default])
    if field.is_required():
        shown = "derived" if "absent = " in meaning else "required"
    kind = "integer or list of integers" if field is POOL else kind
    return [f"`{name}`", kind, shown, meaning, _resume(field)]


def _kinds(annotation: Any) -> Iterator[str]:
    """Yield the words for a type annotation: one, or one per union member, null last."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _kinds(inner[0])
    elif origin in (Union, UnionType):
        for one in sorted(inner, key=lambda kind: kind is NoneType):
            yield from _kinds(one)
    elif origin is Literal:
        yield quote_values(inner)
    elif origin is tuple:
        yield f"list of {' or '.join(PLURALS.get(word, word) for word in _kinds(inner[0]))}"
    elif isinstance(annotation, type) and issubclass(annotation, Enum):
        yield quote_values(word.value for word in annotation)
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield "mapping"
    else:
        yield WORDS.get(origin or annotation, "string")


def _resume(field: FieldInfo) -> str:
    return str(extra_of(field).get("resume", "fixed"))


def tables() -> str:
    """Return Markdown tables for moved keys, keys without effect and refused keys."""
    moved = ([f"`{key}`", f"`{home}`"] for key, home in sorted(MOVED.items()))
    no_ops = (
        [
            quote_values(entry.keys),
            ANY if isinstance(entry.allowed, str) else quote_values(entry.allowed),
            entry.meaning,
        ]
        for entry in NO_OP_LIST
    )
    parts = [
        "## Keys that live on under another name",
        make_table("key | here", moved),
        "## Keys without effect",
        "Accepted with one line at the start, for these values; other values are errors that say "
        "what to use.",
        make_table("key | values | what it means here", no_ops),
        "## Keys that are refused",
        "`false` and `null` are accepted for all of them.",
        make_table(
            "key | why | hint",
            ([quote_values(entry.keys), entry.why, entry.remedy] for entry in REFUSED_LIST),
        ),
        *_tables_of_verl(),
    ]
    return "\n\n".join(parts) + "\n"


def _tables_of_verl() -> Iterator[str]:
    """Yield the table of verl's keys: a title, then its parts."""

    def describe(entry: Tree) -> str:
        parts = {part: value for part, value in entry.items() if part != "to"}
        text = yaml.safe_dump(parts, default_flow_style=True, sort_keys=False, width=10_000)
        return str(text).strip()[1:-1]

    yield "## Keys of verl"
    yield (
        "Values are copied, except `words`, `replace` and `where` (there: here); other values are "
        "refused, copied and left out. Without `if`, and with `unless`, a key has no effect. "
        "`model` is a folder, or a name in the Hugging Face cache."
    )
    given = ([f"`{key}`", f"`{e['to']}`", describe(e)] for key, e in RENAMED.items())
    yield make_table("verl | here | what differs", given)
    yield "## Keys of verl without effect"
    yield "Each is named in a note at the start; `*` stands for any text."
    effects = ([quote_values(keys.split()), why] for why, keys in TABLE["no_effect"].items())
    yield make_table("key | what holds here", effects)
    yield "## Keys of verl that are refused"
    yield 'null, `false`, "" and [] are accepted for all of them.'
    refused = ([quote_values(e["keys"].split()), e["why"], e["remedy"]] for e in TABLE["refused"])
    yield make_table("key | why | hint", refused)


def put_into(text: str) -> str:
    """Return a document with the tables in place of all text after MARK."""
    return f"{text.partition(MARK)[0]}{MARK}\n\n{tables()}"


if __name__ == "__main__":
    for file in map(Path, sys.argv[1:]):
        old = file.read_text(encoding="utf-8")
        file.write_text(put_into(old) if MARK in old else document(), encoding="utf-8")
