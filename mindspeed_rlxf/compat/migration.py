"""Make the tables of `docs/migrating.md` from the schema and the lists of older keys.

`python -m mindspeed_rlxf.compat.migration docs/migrating.md` writes them into the document.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mindspeed_rlxf.compat.older_keys import ANY, NO_OP_LIST, REFUSED_LIST, NoOp
from mindspeed_rlxf.compat.older_toolkit import MOVED
from mindspeed_rlxf.config.architecture import ArchitectureConfig
from mindspeed_rlxf.config.enums import CONFIGURED, Role
from mindspeed_rlxf.config.fields import key
from mindspeed_rlxf.config.keys import PLAIN_SECTIONS, ROLE_SECTIONS, fields
from mindspeed_rlxf.config.reward import FunctionConfig
from mindspeed_rlxf.config.roles import OffloadConfig, OptimizerConfig, RoleConfig
from mindspeed_rlxf.config.sandbox import SandboxConfig
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.config.sections import KlControlConfig, PoolSettings, TrainingConfig
from mindspeed_rlxf.config.suggest import format_value

MARK = "<!-- Everything below is made by: python -m mindspeed_rlxf.compat.migration -->"

# Of the section resource_pool, where the user chooses the names.
POOL = key(..., "processes of the pool of that name: a count, or a list with one for each node")
REWARD_POOL = "its pool; absent with reward.kind=rule = that of the actor, or of ref if it is split"


def tables() -> str:
    """Return Markdown tables of keys that work, are moved, have no effect, or are refused."""
    parts = [
        "## Keys that work",
        *(f"### `{title}`\n\n{_section(names)}" for title, names in _sections().items()),
        "## Keys that live on under another name",
        _table("key | here", ([f"`{key}`", f"`{home}`"] for key, home in sorted(MOVED.items()))),
        "## Keys without effect",
        "Accepted with one line at the start, for these values; other values are errors that say "
        "what to use.",
        _table("key | values | what it means here", map(_no_op, NO_OP_LIST)),
        "## Keys that are refused",
        "`false` and `null` are accepted for all of them.",
        _table(
            "key | why | remedy",
            ([_listed(entry.keys), entry.why, entry.remedy] for entry in REFUSED_LIST),
        ),
    ]
    return "\n\n".join(parts) + "\n"


def put_into(text: str) -> str:
    """Replace the part of the document behind `MARK` with the tables."""
    head, mark, _ = text.partition(MARK)
    if not mark:
        raise ValueError(f"the document must hold the line {MARK!r}; add it where the tables go")
    return f"{head}{MARK}\n\n{tables()}"


def _sections() -> dict[str, dict[str, FieldInfo]]:
    """Map the title of each table to its keys; shared keys of roles and optimizers appear once."""
    common, optimizer = fields(RoleConfig), fields(OptimizerConfig)
    shared = common | optimizer | {"optimizer", "sandbox"}
    own = {role.value: _without(schema, shared) for role, schema in ROLE_SECTIONS.items()}
    plain = {name: _without(schema, {"kl_ctrl"}) for name, schema in PLAIN_SECTIONS.items()}
    pools = {role: REWARD_POOL if role is Role.REWARD else "its pool" for role in CONFIGURED}
    return {
        "training": dict(TrainingConfig.model_fields),
        "every role": _without(RoleConfig, {"architecture", "offload"}),
        "every role: offload": dict(OffloadConfig.model_fields),
        "actor_rollout, critic: optimizer": dict(OptimizerConfig.model_fields),
        **{name: keys for name, keys in own.items() if keys},
        "reward.function": dict(FunctionConfig.model_fields),
        "reward.sandbox": dict(SandboxConfig.model_fields),
        "model.<name>": dict(ArchitectureConfig.model_fields),
        "algorithm": plain.pop("algorithm"),
        "algorithm.kl_ctrl": dict(KlControlConfig.model_fields),
        **plain,
        "placement": {role.value: key(role.value, text) for role, text in pools.items()},
        "resource_pool": {"<pool>": POOL, **PoolSettings.model_fields},
        "the top level": {"dry_run": RunConfig.model_fields["dry_run"]},
    }


def _without(section: type[BaseModel], names: set[str]) -> dict[str, FieldInfo]:
    return {key: field for key, field in section.model_fields.items() if key not in names}


def _section(keys: dict[str, FieldInfo]) -> str:
    rows = ([f"`{key}`", _default(field), field.description or ""] for key, field in keys.items())
    return _table("key | default | meaning", rows)


def _default(field: FieldInfo) -> str:
    """Format the default of a field for a table."""
    if field.is_required():
        return "required"
    value: Any = getattr(field.default, "value", field.default)
    return "a list" if isinstance(value, tuple) and value else _listed([value])


def _no_op(entry: NoOp) -> list[str]:
    values = ANY if isinstance(entry.allowed, str) else _listed(entry.allowed)
    return [_listed(entry.keys), values, entry.meaning]


def _listed(values: Sequence[Any]) -> str:
    """Values as the YAML spells them, in code quotes."""
    texts = (value if isinstance(value, str) else format_value(value) for value in values)
    return ", ".join(f"`{text}`" for text in texts).replace("`()`", "`[]`")


def _table(head: str, rows: Any) -> str:
    """Format a Markdown table. head: titles with " | " between"""
    columns = head.split(" | ")
    cells = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    lines = [columns, ["---"] * len(columns), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(arguments: Sequence[str]) -> int:
    """Write the tables into the document, or print them without one."""
    if len(arguments) != 1:
        print(tables(), end="")
        return 0
    file = Path(arguments[0])
    file.write_text(put_into(file.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
