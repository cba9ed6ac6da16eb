"""Rules that run the program of a response against test cases, in a sandbox.

The ground truth is JSON, as in data sets of programming tasks that other toolkits read:
    {"inputs": ["1 2\n", ...], "outputs": ["3\n", ...]}   standard input and what is printed for it
    {"assert_case": ["assert add(1, 2) == 3", ...]}       statements that run after the program
"""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass
from typing import Any

from mindspeed_rlxf.config.sandbox import SandboxConfig
from mindspeed_rlxf.rewards.rules import RewardResult, register_rule
from mindspeed_rlxf.rewards.sandbox.runner import Sandbox

# A program that ends early, by exit() for instance, does not get to the last line.
_ASSERTIONS = "\nimport sys as _sys\nexec(compile(_sys.stdin.read(), 'test', 'exec'))\n"


@dataclass(frozen=True)
class Case:
    """after: text that follows the program; stdin: its input
    stdout: what it has to print, or with `ends` the last line of it
    """

    after: str
    stdin: str
    stdout: str
    ends: bool = False

    def passes(self, printed: str) -> bool:
        """Compare line by line, without white space at ends of lines and empty lines at the end."""
        lines, expected = _lines(printed), _lines(self.stdout)
        return lines[-1:] == expected if self.ends else lines == expected


class CodeRules:
    """The sandbox that the rules of this process share; it is chosen before the first program."""

    def __init__(self) -> None:
        self.config = SandboxConfig()
        self._sandbox: Sandbox | None = None

    def use(self, config: SandboxConfig) -> str:
        """Choose the sandbox by this configuration. Returns a line on what its level prevents.

        Errors: UserError where no level of isolation works here.
        """
        if self._sandbox is None or config != self.config:
            self.close()
            self._sandbox, self.config = Sandbox.choose(config), config
        return self._sandbox.describe()

    def close(self) -> None:
        if self._sandbox is not None:
            self._sandbox.close()
        self._sandbox = None

    def count_passed(self, program: str, cases: list[Case]) -> int:
        """Count test cases that pass before `reward.sandbox.response_s` is over."""
        self.use(self.config)
        assert self._sandbox is not None, "chosen above"
        deadline = time.monotonic() + self.config.response_s
        passed = 0
        for case in cases:
            if (left := deadline - time.monotonic()) > 0:
                outcome = self._sandbox.run(program + case.after, case.stdin, left)
                passed += outcome.cause == "ok" and case.passes(outcome.stdout)
        return passed


SHARED = CodeRules()


def find_program(response: str) -> str | None:
    """Return the content of the last fenced block that is closed; None without one."""
    program: list[str] | None = None
    block: list[str] | None = None
    for line in response.split("\n"):
        mark = line.strip()
        if mark.startswith("```") and (block is None or mark != "```"):
            block = []  # also where the one before was left open
        elif mark == "```":
            program, block = block, None
        elif block is not None:
            block.append(line)
    return None if program is None else "\n".join(program)


def read_cases(ground_truth: str) -> list[Case]:
    """Read test cases from a JSON object. Errors: ValueError for a text that is no such object."""
    try:
        found = json.loads(ground_truth)
    except json.JSONDecodeError as error:
        raise ValueError(f"test cases must be JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("test cases must not nest deeply") from error
    if not isinstance(found, dict):
        raise ValueError(f"test cases must be a JSON object, not {type(found).__name__}")
    if found.get("fn_name"):
        raise ValueError("test cases that call fn_name must be written as assert_case")
    if (assertions := found.get("assert_case")) is not None:
        return [_assertion(_text(statement)) for statement in _filled_list(assertions)]
    inputs = _filled_list(found.get("inputs"))
    outputs = _filled_list(found.get("outputs"))
    if len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs must have as many outputs, not {len(outputs)}")
    return [Case("", _text(i), _text(o)) for i, o in zip(inputs, outputs, strict=True)]


def accepts(ground_truth: str) -> bool:
    """Whether a ground truth has test cases. Raises ValueError with the reason if it has none."""
    return bool(read_cases(ground_truth))


@register_rule("code", accepts)
def code(response: str, ground_truth: str) -> RewardResult:
    """Score the share of test cases that the response's last fenced block passes.

    parts: {"accuracy": 1.0 all pass, 0.0 else; "passed": share that pass}
    Errors: ValueError for a ground truth without test cases; SandboxError where it stopped working.
    """
    cases = read_cases(ground_truth)
    program = find_program(response)
    passed = SHARED.count_passed(program, cases) if program is not None else 0
    share = passed / len(cases)
    return RewardResult(share, {"accuracy": float(passed == len(cases)), "passed": share})


@register_rule("code_all", accepts)
def code_all(response: str, ground_truth: str) -> RewardResult:
    """As `code`, but score 1 when all test cases pass, else 0."""
    result = code(response, ground_truth)
    return RewardResult(result.parts["accuracy"], result.parts)


def _assertion(statement: str) -> Case:
    """Make the case of a statement; what it prints at its end cannot be known beforehand."""
    word = secrets.token_hex(16)
    return Case(_ASSERTIONS, f"{statement}\nprint('\\n' + {word!r})\n", word, ends=True)


def _filled_list(value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"test cases must be lists that are not empty, not {value!r:.40}")
    return value


def _text(value: Any) -> str:
    """A text, or lines of one."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise ValueError(f"inputs, outputs and assertions must be texts, not {value!r:.40}")
    return value


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
