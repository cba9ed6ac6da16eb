"""Nothing in the package runs text as code, and every name that it reads exists."""

from __future__ import annotations

import ast
import builtins
import dis
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import pytest

ROOT = Path(__file__).parents[2]
FILES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
    for file in sorted((ROOT / "mindspeed_rlxf").rglob("*.py"))
}
RUNS_CODE = {"eval", "exec", "compile", "torch.load", "pickle.load", "pickle.loads"}
# A rank's own error, from the store of its own run.
ALLOWED = {("mindspeed_rlxf.runtime.local", "pickle.loads")}


def dangers(source: str) -> set[str]:
    """Calls that run what they read, by the name they are called by."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name in RUNS_CODE:
            found.add(name)
        for keyword in node.keywords:
            if keyword.arg == "trust_remote_code" and ast.unparse(keyword.value) != "False":
                found.add("trust_remote_code")
    return found


@pytest.mark.parametrize("name", FILES)
def test_no_text_or_file_is_run_as_code(name: str) -> None:
    found = dangers(FILES[name].read_text(encoding="utf-8"))
    assert not {call for call in found if (name, call) not in ALLOWED}


def test_what_runs_code_is_seen() -> None:
    source = "x = eval('1')\ntorch.load(f)\nfrom_pretrained(p, trust_remote_code=flag)\nm.eval()"
    assert dangers(source) == {"eval", "torch.load", "trust_remote_code"}


def globals_read(code: CodeType) -> Iterator[str]:
    """Names that functions look up in their module or the builtins."""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            yield instruction.argval
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from globals_read(constant)


@pytest.mark.parametrize("name", FILES)
def test_every_name_that_is_read_exists(name: str) -> None:
    """Also on paths that no test takes, such as the message of an error."""
    module = importlib.import_module(name)
    code = compile(FILES[name].read_text(encoding="utf-8"), str(FILES[name]), "exec")
    assert set(globals_read(code)) <= vars(module).keys() | vars(builtins).keys()


def test_a_name_that_is_missing_is_seen() -> None:
    code = compile("def f():\n    if 0 > len([]):\n        raise ValueError(gone)\n", "", "exec")
    assert set(globals_read(code)) == {"len", "ValueError", "gone"}
