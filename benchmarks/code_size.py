"""Print the size of code as one JSON line: totals of each folder, and of each room in it.

    python benchmarks/code_size.py [FOLDER ...]          default: mindspeed_rlxf tests

A room is a direct subfolder; modules that stand beside the rooms count as room ".". A statement is
a node of Python's syntax tree that is not a docstring; layout and comments do not count. Lines
include scripts and templates. Folders named `vendor` are left out.
"""

import ast
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

SUFFIXES = {".py", ".js", ".css", ".html"}


def count_statements(tree: ast.AST) -> int:
    """Count the statements in a syntax tree, without docstrings and other lone constants."""
    return sum(isinstance(node, ast.stmt) and not is_constant(node) for node in ast.walk(tree))


def is_constant(node: ast.stmt) -> bool:
    """Return whether a statement is a lone constant, such as a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def function_lengths(tree: ast.AST) -> list[int]:
    """Return the number of lines of each function and method, from `def` to its end."""
    return [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]


def measure(folder: Path) -> dict[str, object]:
    """Return the sizes of all code below a folder, and of its rooms."""
    rooms: dict[str, dict[str, int]] = defaultdict(lambda: {"statements": 0, "lines": 0})
    file_lines, functions = [], []
    for file in sorted(folder.rglob("*")):
        path = file.relative_to(folder)
        if file.suffix not in SUFFIXES or "vendor" in path.parts:
            continue
        text = file.read_text(encoding="utf-8")
        room = rooms[path.parts[0] if len(path.parts) > 1 else "."]
        room["lines"] += len(text.splitlines())
        if file.suffix == ".py":
            tree = ast.parse(text)
            room["statements"] += count_statements(tree)
            file_lines.append(len(text.splitlines()))
            functions += function_lengths(tree)
    return {
        "statements": sum(room["statements"] for room in rooms.values()),
        "lines": sum(room["lines"] for room in rooms.values()),
        "modules": len(file_lines),
        "median_module_lines": statistics.median(file_lines),
        "longest_module_lines": max(file_lines),
        "functions": len(functions),
        "median_function_lines": statistics.median(functions),
        "longest_function_lines": max(functions),
        "rooms": dict(sorted(rooms.items(), key=lambda item: -item[1]["statements"])),
    }


if __name__ == "__main__":
    folders = sys.argv[1:] or ["mindspeed_rlxf", "tests"]
    print(json.dumps({name: measure(Path(name)) for name in folders}))
