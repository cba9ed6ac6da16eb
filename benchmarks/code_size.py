"""Print the size of code as one JSON line: files, statements, lengths of files and functions.

    python benchmarks/code_size.py [FOLDER ...]          default: mindspeed_rlxf tests

A statement is a node of Python's syntax tree that is no docstring; layout and comments do not
count.
"""

from __future__ import annotations

import ast
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path


def statements(tree: ast.AST) -> int:
    """Count the statements in a syntax tree, without docstrings and other constants alone."""
    return sum(isinstance(node, ast.stmt) and not is_text(node) for node in ast.walk(tree))


def is_text(node: ast.stmt) -> bool:
    """Whether a statement is a constant alone, such as a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def function_lengths(tree: ast.AST) -> Iterator[int]:
    """Yield the number of lines of each function and method, from `def` to its end."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield (node.end_lineno or node.lineno) - node.lineno + 1


def size(folder: Path) -> dict[str, float]:
    """Return the figures of all Python files below a folder."""
    texts = [file.read_text(encoding="utf-8") for file in sorted(folder.rglob("*.py"))]
    trees = [ast.parse(text) for text in texts]
    files = [len(text.splitlines()) for text in texts]
    functions = [length for tree in trees for length in function_lengths(tree)]
    return {
        "files": len(files),
        "statements": sum(map(statements, trees)),
        "lines": sum(files),
        "median_file_lines": statistics.median(files),
        "longest_file_lines": max(files),
        "functions": len(functions),
        "median_function_lines": statistics.median(functions),
        "longest_function_lines": max(functions),
    }


if __name__ == "__main__":
    print(
        json.dumps({name: size(Path(name)) for name in sys.argv[1:] or ["mindspeed_rlxf", "tests"]})
    )
