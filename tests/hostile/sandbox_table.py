"""Write the table of hostile programs into docs/data_and_rewards.md."""

import sys
from pathlib import Path

from tests.hostile.sandbox_programs import HOSTILE

BEGIN = "<!-- made by: python -m tests.hostile.sandbox_table docs/data_and_rewards.md -->"
END = "<!-- end of the table -->"


def table() -> str:
    """Return a Markdown table: the hostile programs, and the threats they stand for."""
    lines = [["a program that is stopped", "threat"], ["---", "---"]]
    lines += [[hostile.name, hostile.threat.value] for hostile in HOSTILE]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def put_into(text: str) -> str:
    """Return the document with the table between BEGIN and END replaced."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{table()}\n{END}{tail}"


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(put_into(file.read_text(encoding="utf-8")), encoding="utf-8")
