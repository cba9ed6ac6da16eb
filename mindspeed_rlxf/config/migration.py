"""Make the tables of `docs/migrating.md` from the lists of older keys.

`python -m mindspeed_rlxf.config.migration docs/migrating.md` writes them into the document.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from mindspeed_rlxf.config.mindspeed_llm import MOVED
from mindspeed_rlxf.config.mindspeed_llm_keys import ANY, NO_OP_LIST, REFUSED_LIST, NoOp
from mindspeed_rlxf.config.reference import make_table, quote_values

MARK = "<!-- Everything below is made by: python -m mindspeed_rlxf.config.migration -->"


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
    """Replace the tables in the document that the one argument names; return 0.

    With no argument, or several, print the tables.
    """
    if len(arguments) != 1:
        print(tables(), end="")
        return 0
    file = Path(arguments[0])
    file.write_text(put_into(file.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
