"""Print how often docstrings use some words, for each 1,000 of their words, as one JSON line.

    python benchmarks/docstring_words.py [FOLDER ...]          default: mindspeed_rlxf

With a checkout of another project as a second folder, the numbers stand side by side.
"""

import ast
import json
import re
import sys
from collections import Counter
from pathlib import Path

WORDS = ("of", "that", "where", "which")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def measure(folder: Path) -> dict[str, float]:
    """Return the number of docstring words below a folder, and the rate of each of WORDS."""
    counts: Counter[str] = Counter()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, DOCUMENTED):
                counts.update(re.findall(r"[a-z]+", (ast.get_docstring(node) or "").lower()))
    total = counts.total()
    return {"words": total, **{word: round(1000 * counts[word] / total, 1) for word in WORDS}}


if __name__ == "__main__":
    print(json.dumps({name: measure(Path(name)) for name in sys.argv[1:] or ["mindspeed_rlxf"]}))
