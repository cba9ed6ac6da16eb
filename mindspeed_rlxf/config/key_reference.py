"""Make `docs/configuration.md` from the schema, and the tables of `docs/migrating.md`.

`python -m mindspeed_rlxf.config.key_reference docs/configuration.md docs/migrating.md` writes them,
as `make docs` does. `docs/migrating.md` keeps its text above MARK.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mindspeed_rlxf.config.algorithm import KlControlConfig
from mindspeed_rlxf.config.architecture import ArchitectureConfig
from mindspeed_rlxf.config.enums import CONFIGURED, Role
from mindspeed_rlxf.config.fields import extra_of, key
from mindspeed_rlxf.config.keys import PLAIN_SECTIONS, ROLE_SECTIONS
from mindspeed_rlxf.config.mindspeed_llm import MOVED
from mindspeed_rlxf.config.mindspeed_llm_keys import ANY, NO_OP_LIST, REFUSED_LIST, NoOp
from mindspeed_rlxf.config.problems import format_value
from mindspeed_rlxf.config.reward_section import FunctionConfig, SandboxConfig
from mindspeed_rlxf.config.roles import OffloadConfig, OptimizerConfig, RoleConfig
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.config.sections import PoolSettings, TrainingConfig

HEAD = """\
# Configuration reference

<!-- Made by: python -m mindspeed_rlxf.config.key_reference docs/configuration.md -->

Every key of the YAML. [Configuring and running](running.md) says how files and the command line are
put together. An unknown key is an error that names the nearest known one.

The column "resume" says what happens when a run is resumed with another value of the key:

| word | meaning |
| --- | --- |
| fixed | the run is refused; `training.new_run=true` starts a new one |
| reshard | allowed; the layout changes, so results agree within rounding, not bit by bit |
| free | allowed, and logged |
"""

MARK = "<!-- Everything below is made by: python -m mindspeed_rlxf.config.key_reference -->"

# Of the section resource_pool, where the user chooses the names.
POOL = key(
    ..., "processes of the pool of that name: a count, or a list with one for each node", "reshard"
)
REWARD_POOL = "its pool; absent with reward.kind=rule = that of the actor, or of ref if it is split"
WORDS = {
    bool: "`true`, `false`",
    int: "integer",
    float: "number",
    str: "text",
    dict: "mapping",
    Any: "any value",
    NoneType: "`null`",
}
PLURALS = {"integer": "integers", "number": "numbers", "text": "texts", "mapping": "mappings"}
LIMITS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def document() -> str:
    """Return the page `docs/configuration.md` as Markdown: HEAD, then a table per section."""
    tables = (f"## `{title}`\n\n{_section(keys)}" for title, keys in sections().items())
    return "\n".join((HEAD, "\n\n".join(tables))) + "\n"


def sections() -> dict[str, dict[str, FieldInfo]]:
    """Map the title of each table to its fields by key, in the order of the page.

    Keys that several roles share have a table of their own; a role without keys of its own has
    none.
    """
    own = {role.value: _own_keys(schema) for role, schema in ROLE_SECTIONS.items()}
    plain = {name: _fields_without(schema, {"kl_ctrl"}) for name, schema in PLAIN_SECTIONS.items()}
    pools = {role: REWARD_POOL if role is Role.REWARD else "its pool" for role in CONFIGURED}
    placed = {role.value: key(role.value, text, "reshard") for role, text in pools.items()}
    return {
        "training": dict(TrainingConfig.model_fields),
        "every role": _fields_without(RoleConfig, {"architecture", "offload"}),
        "every role: offload": dict(OffloadConfig.model_fields),
        "actor_rollout, critic: optimizer": dict(OptimizerConfig.model_fields),
        **{name: keys for name, keys in own.items() if keys},
        "reward.function": dict(FunctionConfig.model_fields),
        "reward.sandbox": dict(SandboxConfig.model_fields),
        "model.<name>": dict(ArchitectureConfig.model_fields),
        "algorithm": plain.pop("algorithm"),
        "algorithm.kl_ctrl": dict(KlControlConfig.model_fields),
        **plain,
        "placement": placed,
        "resource_pool": {"<pool>": POOL, **PoolSettings.model_fields},
        "the top level": {"dry_run": RunConfig.model_fields["dry_run"]},
    }


def _own_keys(schema: type[RoleConfig]) -> dict[str, FieldInfo]:
    """Map a role's keys, but for those that other tables have, to their fields."""
    common = {
        name
        for name, field in RoleConfig.model_fields.items()
        if _meaning(field) == _meaning(schema.model_fields[name])
    }
    elsewhere = {*OptimizerConfig.model_fields, "architecture", "offload", "optimizer", "sandbox"}
    return _fields_without(schema, common | elsewhere)


def make_table(head: str, rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table without final line break, with `|` in cells (not in `head`) escaped.

    head: titles with " | " between them
    """
    columns = head.split(" | ")
    cells = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    lines = [columns, ["---"] * len(columns), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def quote_values(values: Iterable[Any]) -> str:
    """Return values as in YAML, each in backticks, separated by commas.

    Texts are written as they are, an empty tuple as `[]`, others by `format_value`.
    """
    texts = (value if isinstance(value, str) else format_value(value) for value in values)
    return ", ".join(f"`{text}`" for text in texts).replace("`()`", "`[]`")


def _fields_without(section: type[BaseModel], names: set[str]) -> dict[str, FieldInfo]:
    return {key: field for key, field in section.model_fields.items() if key not in names}


def _section(keys: dict[str, FieldInfo]) -> str:
    rows = [
        [f"`{name}`", _type(field), _default(field), field.description or "", _resume(field)]
        for name, field in keys.items()
    ]
    return make_table("key | type | default | meaning | resume", rows)


def _type(field: FieldInfo) -> str:
    """Return the type and limits of a key's values for the table, as `integer >= 1` or `A or B`.

    Of several types the first has the limits.
    """
    if field is POOL:
        return "integer or list of integers"
    first, *others = dict.fromkeys(_kinds(field.annotation))
    bounds = [
        f"{sign} {value}"
        for part in field.metadata
        for name, sign in LIMITS.items()
        if (value := getattr(part, name, None)) is not None
    ]
    return " or ".join((f"{first} {', '.join(bounds)}".rstrip(), *others))


def _kinds(annotation: Any) -> Iterator[str]:
    """Yield the words for a type annotation: one, or one for each member of a union, null last."""
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
        yield WORDS.get(origin or annotation, "text")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "derived" if "absent = " in (field.description or "") else "required"
    value: Any = getattr(field.default, "value", field.default)
    return "a list" if isinstance(value, tuple) and value else quote_values([value])


def _meaning(field: FieldInfo) -> tuple[str | None, str]:
    return field.description, _resume(field)


def _resume(field: FieldInfo) -> str:
    return str(extra_of(field).get("resume", "fixed"))


def tables() -> str:
    """Return Markdown tables of keys that are moved, have no effect, or are refused."""
    moved = ([f"`{key}`", f"`{home}`"] for key, home in sorted(MOVED.items()))
    parts = [
        "## Keys that live on under another name",
        make_table("key | here", moved),
        "## Keys without effect",
        "Accepted with one line at the start, for these values; other values are errors that say "
        "what to use.",
        make_table("key | values | what it means here", map(_no_op, NO_OP_LIST)),
        "## Keys that are refused",
        "`false` and `null` are accepted for all of them.",
        make_table(
            "key | why | remedy",
            ([quote_values(entry.keys), entry.why, entry.remedy] for entry in REFUSED_LIST),
        ),
    ]
    return "\n\n".join(parts) + "\n"


def put_into(text: str) -> str:
    """Return the document with all text after the first `MARK` replaced by the tables.

    Raises ValueError if `MARK` is not in it.
    """
    head, mark, _ = text.partition(MARK)
    if not mark:
        raise ValueError(f"the document must have the line {MARK!r}; add it where the tables go")
    return f"{head}{MARK}\n\n{tables()}"


def _no_op(entry: NoOp) -> list[str]:
    values = ANY if isinstance(entry.allowed, str) else quote_values(entry.allowed)
    return [quote_values(entry.keys), values, entry.meaning]


def main(arguments: Sequence[str]) -> int:
    """Write the page or the tables into each file that is named, by its name; return 0.

    Prints the page without arguments.
    """
    for file in map(Path, arguments):
        old = file.read_text(encoding="utf-8")
        text = put_into(old) if MARK in old else document()
        file.write_text(text, encoding="utf-8")
    if not arguments:
        print(document(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
