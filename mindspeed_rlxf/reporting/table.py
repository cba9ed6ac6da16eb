"""Format aligned text tables."""

import re
from collections.abc import Mapping, Sequence

NONE = "-"


def named_table(rows: Sequence[Mapping[str, object]]) -> str:
    """Format rows of title -> cell as `table`; a cell that a row lacks is "-".

    The first row has every title, in their order.
    """
    titles = list(rows[0])
    return table([titles, *([row.get(title, NONE) for title in titles] for row in rows)])


def table(rows: Sequence[Sequence[object]], indent: int = 2) -> str:
    """Format equally long rows as columns, two spaces apart; the first row is underlined.

    A column is right-aligned if its cells below the first row are "-" or unsigned numbers, possibly
    followed by GiB or MiB.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    number = re.compile(r"-|[\d,.]*\d[\d,.]*( [GM]iB)?", re.ASCII)
    columns = zip(*cells, strict=True)
    right = [all(map(number.fullmatch, column[1:])) for column in columns]
    cells.insert(1, ["-" * width for width in widths])
    lines = []
    for row in cells:
        padded = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ]
        lines.append((" " * indent + "  ".join(padded)).rstrip())
    return "\n".join(lines)


def pairs(rows: Sequence[tuple[str, object]], indent: int = 2) -> str:
    """Format non-empty `name  value` rows with aligned values."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{'':{indent}}{name:<{width}}  {value}" for name, value in rows)
