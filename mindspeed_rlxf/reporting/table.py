"""Format aligned text tables."""

import re
from collections.abc import Sequence


def table(rows: Sequence[Sequence[object]], indent: int = 2) -> str:
    """Format rows of equal length as columns, two spaces apart; at least one row.

    The first row is underlined. A column is right-aligned if all cells below the first are "-" or
    numbers without a sign, also with GiB or MiB after them. indent: spaces before each line
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
    """Format `name  value` lines with the values in one column; `rows` must not be empty."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{'':{indent}}{name:<{width}}  {value}" for name, value in rows)
