"""Rules of programs: which code block is run, how test cases are read, which outcomes pass."""

import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.config.problems import UserError
from mindspeed_rlxf.config.reward_section import SandboxConfig
from mindspeed_rlxf.rewards import programs
from mindspeed_rlxf.rewards.programs import Case, code, code_all, find_program, read_cases
from mindspeed_rlxf.rewards.sandbox import Outcome, SandboxError

ADD = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]})
CALLS = json.dumps({"assert_case": ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]})


def block(program: str) -> str:
    return f"First I think.\n```python\n{program}\n```\nThat is all."


@pytest.fixture(scope="module")
def rules() -> Iterator[programs.CodeRules]:
    """The rules with the strongest sandbox of this host."""
    try:
        programs.SHARED.use(SandboxConfig())
    except UserError as error:
        pytest.skip(f"bubblewrap does not work here: {error}")
    yield programs.SHARED


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("no block", None),
        ("```python\nprint(1)", None),  # cut off
        ("```\na\n```\ntext\n```py\nb\n\nc\n```", "b\n\nc"),
        ("```python\ncut off\n```python\nprint(1)\n```", "print(1)"),
        ("   ```\n  x = 1\n   ```", "x = 1"),
        ("```py\nx\n```\n```py\ncut off", "x"),
        ("`x`\n``` \n```", ""),
        ("```python\na()\n```\nRun it:\n```bash\npython a.py\n```", "a()"),
        ("```python\na()\n```\nIt prints:\n```\n3\n```", "a()"),
        ("```python\na()\n```\nIt prints:\n```output\n3\n```\n```json\n{}\n```", "a()"),
        ("```python\na()\n```\nBetter:\n```\nb()\n```", "b()"),
        ("```\nx\n```\n```\n3\n```", "3"),
        ("```cpp\nint a;\n```", None),
        ("~~~python\na()\n~~~", "a()"),
        ("~~~\na = '```'\n~~~", "a = '```'"),
        ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''"),
        ("1. So:\n   ```python\n   if a:\n       b()\n   ```", "if a:\n    b()"),
        ("- ```python\n  a()\n  b()\n  ```", "a()\nb()"),
        ("\t```python\n\ta()\n\t```", "a()"),
        ("> ```python\n> if a:\n>     b()\n> ```", "if a:\n    b()"),
        ("Code:```Python3\na()\n```", "a()"),
        ("``` python\na()\n```", "a()"),
        ("```{.python}\na()\n```", "a()"),
        ('```python title="a.py"\na()\n```', "a()"),
        ("```python\na()```", "a()"),
        ("```python\r\na()\r\n```\r\n", "a()\r"),
    ],
)
def test_the_last_closed_block_of_python_is_the_program(response: str, program: str | None) -> None:
    assert find_program(response) == program


def test_lines_of_inputs_are_joined() -> None:
    text = json.dumps({"inputs": [["1", "2"], "3"], "outputs": [["a"], "b\n"]})
    assert read_cases(text) == [Case("", "1\n2", "a"), Case("", "3", "b\n")]


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        ("7", "should be an object"),
        ('{"inputs": ["1"], "outputs": []}', "as many outputs, not 1 and 0"),
        ("{}", "must be assert_case, or inputs"),
        ('{"assert_case": "assert 1"}', "test cases assert_case: Input should be a valid array"),
        ('{"fn_name": "f", "inputs": [[1]], "outputs": [1]}', "test cases fn_name: "),
        ("[" * 100_000, "recursion limit"),
    ],
)
def test_a_ground_truth_without_test_cases_is_refused(truth: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_cases(truth)


@pytest.mark.parametrize(
    ("printed", "passes"), [("1 \n2\n\n", True), ("1\n2", True), ("1\n", False), ("1\n\n2", False)]
)
def test_white_space_at_ends_of_lines_does_not_count(printed: str, passes: bool) -> None:
    assert Case("", "", "1\n2\n").passes(printed) is passes


def test_the_score_is_the_share_of_cases_that_pass(rules: programs.CodeRules) -> None:
    right = code(block("a, b = map(int, input().split())\nprint(a + b)"), ADD)
    half = code(block("input()\nprint(3)"), ADD)
    assert (right.score, right.parts) == (1.0, {"accuracy": 1.0, "passed": 1.0})
    assert (half.score, half.parts) == (0.5, {"accuracy": 0.0, "passed": 0.5})
    assert code_all(block("input()\nprint(3)"), ADD).score == 0.0
    assert code("The sum is 3.", ADD).score == 0.0
    assert code(block("print(3)\nraise SystemExit(1)"), ADD).score == 0.0  # prints it, and fails


def test_assertions_run_after_the_program(rules: programs.CodeRules) -> None:
    assert code(block("def add(a, b):\n    return a + b\nprint(add(1, 1))"), CALLS).score == 1.0
    assert code(block("def add(a, b):\n    return 3"), CALLS).score == 0.5


@pytest.mark.parametrize("end", ["exit()", "import os; os._exit(0)", "raise SystemExit", "'''"])
def test_a_program_that_ends_before_the_assertions_fails(
    rules: programs.CodeRules, end: str
) -> None:
    assert code(block(f"def add(a, b):\n    return 0\n{end}"), CALLS).score == 0.0


def test_a_program_is_the_main_module_and_finds_no_name_of_ours(rules: programs.CodeRules) -> None:
    names = "sorted(name for name in globals() if not name.startswith('__'))"
    program = f"print({names}, __name__)\nimport sys\nprint(len(sys.argv), __file__ == sys.argv[0])"
    truth = json.dumps({"inputs": [""], "outputs": ["[] __main__\n1 True"]})
    assert code(block(program), truth).score == 1.0


def test_cases_end_with_the_time_of_a_response() -> None:
    """The first case takes the time of all: with reward.sandbox.response_s it is the only one."""
    ran = []

    class Slow:
        config = SandboxConfig()

        def run(self, program: str, stdin: str, wall_s: float) -> Outcome:
            ran.append(stdin)
            return Outcome("3\n", 0, "ok")

    shared = programs.CodeRules()
    shared.sandbox = Slow()  # type: ignore[assignment]
    cases = read_cases(ADD)
    assert shared.count_passed("", cases) == 1 and len(ran) == 2
    ran.clear()
    Slow.config = SandboxConfig(response_s=1e-9)
    assert shared.count_passed("", cases) == 0 and ran == []


def test_a_sandbox_that_stopped_working_is_no_score(rules: programs.CodeRules) -> None:
    """A zero for a program that never ran would be trained."""
    broken: Any = copy.copy(rules.sandbox)
    broken.python = "/nowhere/python3"
    with pytest.raises(SandboxError, match="/nowhere/python3"):
        broken.run("print(1)")


@pytest.mark.usefixtures("rules")
def test_the_program_of_the_documents_prints_what_they_say() -> None:
    text = (Path(__file__).parents[3] / "docs" / "data_and_rewards.md").read_text(encoding="utf-8")
    blocks = [text.split(f"~~~{kind}\n")[1].split("~~~")[0] for kind in ("python", "text")]
    program, printed = blocks
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.endswith(printed), done.stderr
