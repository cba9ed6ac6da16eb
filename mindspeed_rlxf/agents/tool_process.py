"""Call tools: `main` runs in a process started by `rewards.workers`, which kills it if it hangs."""

import asyncio
import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mindspeed_rlxf.config.plugins import Source, run_as_module
from mindspeed_rlxf.config.reward_section import SandboxConfig, find_function
from mindspeed_rlxf.config.tool_schema import PYTHON
from mindspeed_rlxf.rewards.outcome import Cause
from mindspeed_rlxf.rewards.scoring import format_traceback, serve


@dataclass(frozen=True)
class ToolPlan:
    """Everything a tool process needs.

    Attributes:
        functions: Each tool's file; its name is the function's.
        sandbox: Limits of the tool `python`; None = there is none.
    """

    functions: tuple[tuple[str, Source], ...] = ()
    sandbox: SandboxConfig | None = None


@dataclass(frozen=True)
class ToolRequest:
    """A call.

    Attributes:
        name: Of the tool.
        arguments: JSON of what the model and the row gave, by parameter.
    """

    name: str
    arguments: str


def main() -> None:
    """Call tools until the parent closes the socket."""
    serve(make_caller)


def make_caller(plan: ToolPlan) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a function from a `ToolRequest` as a dict to {text} or {cause, message, details}.

    It runs the plan's files, whose exceptions it lets through.
    """
    functions: dict[str, Callable[..., Any]] = {}
    for name, source in plan.functions:
        module = sys.modules.get(source.module) or run_as_module(source)
        functions[name] = find_function(module, name)
    if plan.sandbox is not None:
        functions[PYTHON] = _make_python(plan.sandbox)
    return lambda request: _call(functions, **request)


def _call(
    functions: dict[str, Callable[..., Any]],
    name: str,
    arguments: str,
) -> dict[str, Any]:
    """Call a tool; an exception is a text too, which the model reads."""
    try:
        value = functions[name](**json.loads(arguments))
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        is_text = isinstance(value, str)
        return {"text": value if is_text else json.dumps(value, ensure_ascii=False, default=str)}
    except MemoryError:
        return {"cause": Cause.MEMORY.value, "message": f"{name}: MemoryError"}
    except SystemExit as error:
        return {"cause": Cause.EXIT.value, "message": f"{name}: sys.exit({error.code!r:.60})"}
    except BaseException as error:
        text = f"Error: {type(error).__name__}: {error}"
        return {"text": text, "details": format_traceback(error)}


def _make_python(config: SandboxConfig) -> Callable[[str], str]:
    from mindspeed_rlxf.rewards.sandbox import Sandbox

    sandbox = Sandbox.choose(config)

    def python(code: str) -> str:
        outcome = sandbox.run(code)
        if outcome.cause == "ok":
            return outcome.stdout
        last_line = outcome.stderr.strip().rpartition("\n")[2]
        reason = last_line if outcome.cause == "error" else f"it exceeded the limit {outcome.cause}"
        return f"{outcome.stdout}Error: {reason}"

    return python
