r"""Rules that run a response's program against test cases, in a sandbox.

The ground truth is JSON, as other toolkits store programming tasks:
    {"inputs": ["1 2\n", ...], "outputs": ["3\n", ...]}   standard input and expected output
    {"assert_case": ["assert add(1, 2) == 3", ...]}       statements that run after the program
"""

import ast
import re
import secrets
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ValidationError

from mindspeed_rlxf.config.reward_section import SandboxConfig
from mindspeed_rlxf.rewards.rules import RewardResult, register_rule
from mindspeed_rlxf.rewards.sandbox import Sandbox

# A program that ends early, by exit() for instance, does not get to the last line.
_ASSERTIONS = "\nimport sys as _sys\nexec(compile(_sys.stdin.read(), 'test', 'exec'))\n"


@dataclass(frozen=True)
class Case:
    """One test case for a program.

    Attributes:
        after: Code appended to the program.
        stdin: Program input.
        stdout: Text to print; with `ends`, the last line to print.
        ends: See `stdout`.
    """

    after: str
    stdin: str
    stdout: str
    ends: bool = False

    def passes(self, printed: str) -> bool:
        """Whether the printed text is as expected.

        White space at line ends and empty lines at the end do not count.
        """
        lines = _strip_lines(printed)
        expected = _strip_lines(self.stdout)
        return lines[-1:] == expected if self.ends else lines == expected


def _strip_lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


class CodeRules:
    """This process's sandbox for all rules; it is opened for the first program."""

    sandbox: Sandbox | None = None

    def use(self, config: SandboxConfig) -> str:
        """Open a sandbox with this configuration; return a line about it.

        Raises UserError if none works here.
        """
        self.sandbox = Sandbox.choose(config)
        return self.sandbox.describe()

    def count_passed(self, program: str, cases: list[Case]) -> int:
        """Return how many cases the program passes; together they have `response_s`."""
        sandbox = self.sandbox = self.sandbox or Sandbox.choose(SandboxConfig())
        deadline = time.monotonic() + sandbox.config.response_s
        num_passed = 0
        for case in cases:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            outcome = sandbox.run(program + case.after, case.stdin, left_s)
            num_passed += outcome.cause == "ok" and case.passes(outcome.stdout)
        return num_passed


SHARED = CodeRules()


# Perhaps text before it ("Code: ```python"), the fence, its tag, and what may follow a tag.
_FENCE = re.compile(r"(?P<before>[^`~\n]*?)(?P<fence>`{3,}|~{3,})\s*\{?\.?(?P<tag>[^\s`{}]*)[^`]*")
_QUOTE = re.compile(r"[ \t]{0,3}(?:>[ \t]?)+")


def find_program(response: str) -> str | None:
    """Return the last closed Markdown block tagged as Python or untagged; None without one.

    Fences are of backticks or tildes, also indented, in lists and in quotes. An untagged block
    after one of Python counts only if it is a program, as it may show what that prints.
    """
    program: str | None = None
    is_tagged = False  # whether the program's block has a tag
    for tag, text in _find_blocks(response):
        if not tag.startswith("python") and tag not in ("", "py", "py3"):
            continue
        if text[:1].isspace():
            text = textwrap.dedent(text)
        if tag or not is_tagged or _is_program(text):
            program = text
            is_tagged = bool(tag)
    return program


def _find_blocks(response: str) -> Iterator[tuple[str, str]]:
    """Yield the tag in lower case and the text of each closed block.

    A fence with a tag also begins a block where the one before was not closed.
    """
    fence = ""  # of the open block
    tag = ""  # of the open block
    prefix = ""  # quote marks in front of its lines
    begin = 0  # of its text
    for start, end in _find_fence_lines(response):
        line = response[start:end]
        if prefix:
            line = line.removeprefix(prefix)
        if fence:
            body, is_closing = _split_closing(line, fence)
            if is_closing:
                inner = response[begin : max(begin, start - 1)]
                if prefix:
                    lines = inner.split("\n")
                    inner = "\n".join(line.removeprefix(prefix) for line in lines)
                if body.strip():
                    inner = f"{inner}\n{body}" if inner else body.strip()
                yield tag, inner
                fence = prefix = ""
                continue
        opening = _FENCE.fullmatch(line)
        if fence:
            is_same_kind = opening is not None and opening["fence"][0] == fence[0]
            if opening is None or not is_same_kind or not opening["tag"]:
                continue
            if opening["before"].strip():
                continue
        if opening is None:
            continue
        quote = _QUOTE.match(line) if ">" in line else None
        prefix = "" if quote is None else quote[0]
        fence = opening["fence"]
        tag = opening["tag"].lower()
        begin = end + 1


def _find_fence_lines(text: str) -> Iterator[tuple[int, int]]:
    """Yield where each line with three backticks or tildes begins and ends."""
    has_tildes = "~~~" in text
    end = 0
    while end < len(text):
        positions = [text.find("```", end)]
        if has_tildes:
            positions.append(text.find("~~~", end))
        positions = [position for position in positions if position >= 0]
        if not positions:
            return
        position = min(positions)
        start = text.rfind("\n", 0, position) + 1
        end = text.find("\n", position)
        if end < 0:
            end = len(text)
        yield start, end


def _split_closing(line: str, fence: str) -> tuple[str, bool]:
    """Return what a line has before the fence that ends it, and whether one does."""
    text = line.rstrip()
    if text == fence:
        return "", True
    body = text.rstrip(fence[0])
    is_closing = len(text) - len(body) >= len(fence)
    return (body, True) if is_closing else (line, False)


def _is_program(text: str) -> bool:
    """Whether a text is Python that does something: more than values, as in printed output."""
    try:
        statements = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    for statement in statements:
        if not isinstance(statement, ast.Expr) or isinstance(statement.value, ast.Call):
            return True
    return False


class _TestCases(BaseModel):
    fn_name: Literal["", None] = None  # such cases have to be written as assert_case
    inputs: list[str | list[str]] = []
    outputs: list[str | list[str]] = []
    assert_case: list[str | list[str]] = []


def read_cases(ground_truth: str) -> list[Case]:
    """Read at least one test case from a ground truth, else raise ValueError."""
    try:
        cases = _TestCases.model_validate_json(ground_truth)
    except ValidationError as error:
        details = error.errors()[0]
        key = " ".join(map(str, ["test cases", *details["loc"][:1]]))
        raise ValueError(f"{key}: {details['msg']}") from None
    inputs = _join_lines(cases.inputs)
    outputs = _join_lines(cases.outputs)
    assertions = _join_lines(cases.assert_case)
    if len(inputs) != len(outputs) or not (inputs or assertions):
        rule = "test cases must be assert_case, or inputs and as many outputs"
        raise ValueError(f"{rule}, not {len(inputs)} and {len(outputs)}")
    if not assertions:
        return [Case("", stdin, stdout) for stdin, stdout in zip(inputs, outputs, strict=True)]
    assertion_cases = []
    for statement in assertions:
        # An assertion passes if a random word is printed last, after the statement. A program
        # cannot guess the word, but it can read it from standard input.
        word = secrets.token_hex(16)
        stdin = f"{statement}\nprint('\\n' + {word!r})\n"
        assertion_cases.append(Case(_ASSERTIONS, stdin, word, ends=True))
    return assertion_cases


def _join_lines(entries: list[str | list[str]]) -> list[str]:
    """Return each entry as one string; an entry may be a list of lines."""
    return [entry if isinstance(entry, str) else "\n".join(entry) for entry in entries]


@register_rule("code", read_cases)
def code(response: str, ground_truth: str) -> RewardResult:
    """Score the fraction of cases that the response's program (`find_program`) passes."""
    cases = read_cases(ground_truth)
    program = find_program(response)
    num_passed = 0 if program is None else SHARED.count_passed(program, cases)
    fraction = num_passed / len(cases)
    accuracy = float(num_passed == len(cases))
    return RewardResult(fraction, {"accuracy": accuracy, "passed": fraction})


@register_rule("code_all", read_cases)
def code_all(response: str, ground_truth: str) -> RewardResult:
    """Score as `code`, but 1 if all cases pass, else 0."""
    result = code(response, ground_truth)
    return RewardResult(float(result.parts["accuracy"]), result.parts)
