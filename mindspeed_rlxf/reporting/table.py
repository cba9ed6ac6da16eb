"""Format aligned text tables."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[object]], indent: int = 2) -> str:
    """Format rows of equal length as columns, two spaces apart; at least one row.

    The first row is underlined. A column is right-aligned if all cells below the first are "-" or
    numbers without a sign, also with GiB or MiB after them. indent: spaces before each line
    """
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right = [all(_is_number(cell) for cell in column[1:]) for column in zip(*cells, strict=True)]
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


def _is_number(cell: str) -> bool:
    number = cell.removesuffix(" GiB").removesuffix(" MiB")
    return number.replace(",", "").replace(".", "").isdigit() or cell == "-"
