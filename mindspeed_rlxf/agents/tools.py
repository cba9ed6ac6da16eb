"""Tools of agents: functions of `rollout.tools`, called in processes, and the agent `tools`."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mindspeed_rlxf.agents import tool_process
from mindspeed_rlxf.agents.session import Message, Session, ToolCall, ToolFailed, register_agent
from mindspeed_rlxf.agents.tool_process import ToolPlan, ToolRequest
from mindspeed_rlxf.config.plugins import Source, find_carried, run_as_module
from mindspeed_rlxf.config.reward_section import RewardConfig, find_function, split_name
from mindspeed_rlxf.config.rollout_section import RolloutConfig, ToolConfig
from mindspeed_rlxf.config.sections import DataConfig
from mindspeed_rlxf.config.tool_schema import PYTHON_SCHEMA, describe_tool, row_parameters
from mindspeed_rlxf.rewards.outcome import ScoringBroken
from mindspeed_rlxf.rewards.workers import WorkerPool

HELD_S = 0.1  # between two restarts of a clock that stands still
TOOLS_KWARGS = "tools_kwargs"
"""Column with further arguments of a row's tools, by tool; as verl has it."""


class ToolBox:
    """The tools of this process's agents; a pool of processes runs them, and ends with this one.

    Attributes:
        schemas: JSON schemas, for the chat template.
    """

    def __init__(self, rollout: RolloutConfig, reward: RewardConfig) -> None:
        """Read the tools' files, which the driver has carried here. Nothing starts before a call.

        `reward.sandbox` has the limits of the tool `python`.
        """
        sources = [(tool.name, _source_of(tool)) for tool in rollout.tools if not tool.is_python]
        self.schemas = tool_schemas(rollout)
        self._row_parameters = {
            name: row_parameters(_find_function(name, source)) for name, source in sources
        }
        self._parameters = {
            schema["function"]["name"]: schema["function"]["parameters"]["properties"]
            for schema in self.schemas
        }
        self._max_length = rollout.max_tool_response_length
        self._pool = WorkerPool(
            ToolPlan(tuple(sources), reward.sandbox if rollout.runs_python else None),
            rollout.tool_processes,
            rollout.turn_timeout_s,
            int(reward.worker_memory_gib * 2**30),
            tool_process.main,
            dict,
        )

    async def call(self, call: ToolCall, row_arguments: Mapping[str, Any]) -> str:
        """Call a tool; return what the model reads.

        That is also an error or the end of the tool, or what is wrong with the call.

        Args:
            call: As the model made it.
            row_arguments: The row's `tools_kwargs`: arguments by tool, or verl's `create_kwargs`
                and `execute_kwargs` by tool. Keyword-only parameters take theirs.

        Raises:
            ToolFailed: No process of tools starts.
        """
        problem = call.problem or self._find_problem(call)
        if problem:
            return f"Error: {problem}"
        row_values = dict(row_arguments.get(call.name) or {})
        for key in ("create_kwargs", "execute_kwargs"):
            row_values |= row_values.pop(key, None) or {}
        arguments_by_name = dict(call.arguments)
        for name in self._row_parameters.get(call.name, []):
            if row_values.get(name) is not None:
                arguments_by_name[name] = row_values[name]
        try:
            arguments = json.dumps(arguments_by_name, default=str)
        except RecursionError:
            return "Error: the arguments are nested too deeply"
        try:
            future = self._pool.submit(ToolRequest(call.name, arguments))
            reply = await asyncio.wrap_future(future)
        except ScoringBroken as error:
            raise ToolFailed(f"the tool {call.name} cannot run: {error}") from None
        if "cause" in reply:
            return f"Error: {reply['message']}"
        return self._truncate(reply["text"])

    def close(self) -> None:
        """Kill the processes."""
        self._pool.close()

    def _find_problem(self, call: ToolCall) -> str:
        if call.name not in self._parameters:
            return f"there is no tool {call.name!r:.80}; there is {', '.join(self._parameters)}"
        known = self._parameters[call.name]
        unknown = sorted(call.arguments.keys() - known.keys())
        if unknown:
            has = ", ".join(known) or "none"
            return f"{call.name} has no parameter {unknown[0]!r:.80}; it has {has}"
        return ""

    def _truncate(self, text: str) -> str:
        """Cut the middle out of a text over `rollout.max_tool_response_length`."""
        if len(text) <= self._max_length:
            return text
        half = self._max_length // 2
        return f"{text[:half]}...(truncated)...{text[-half:]}"


def tool_schemas(rollout: RolloutConfig) -> list[dict[str, Any]]:
    """Return the JSON schemas of a run's tools, in order; runs their files in this process."""
    return [
        PYTHON_SCHEMA
        if tool.is_python
        else describe_tool(_find_function(tool.name, _source_of(tool)))
        for tool in rollout.tools
    ]


def show_tools(data: DataConfig, rollout: RolloutConfig) -> DataConfig:
    """Return the section `data` with which chat templates show the tools in prompts."""
    if not rollout.tools:
        return data
    template_kwargs = {**data.chat_template_kwargs, "tools": tool_schemas(rollout)}
    return data.model_copy(update={"chat_template_kwargs": template_kwargs})


def _source_of(tool: ToolConfig) -> Source:
    file_and_name = split_name(tool.function)
    assert file_and_name is not None and tool.sha256 is not None, "the driver has read the file"
    return find_carried(file_and_name[0], tool.sha256)


def _find_function(name: str, source: Source) -> Callable[..., Any]:
    return find_function(sys.modules.get(source.module) or run_as_module(source), name)


class _Opened:
    box: ToolBox | None = None


def open_tools(rollout: RolloutConfig, reward: RewardConfig) -> ToolBox:
    """Make this process's tools, which `call_tools` uses; former ones are closed."""
    close_tools()
    _Opened.box = ToolBox(rollout, reward)
    return _Opened.box


def close_tools() -> None:
    """Kill the processes of this process's tools."""
    if _Opened.box is not None:
        _Opened.box.close()
    _Opened.box = None


async def call_tools(session: Session, calls: Sequence[ToolCall]) -> list[Message]:
    """Make a turn's calls at the same time; return a message of the role tool for each, in order.

    The agent's clock stands still: each call has `rollout.turn_timeout_s` once a process takes it.

    Raises:
        ToolFailed: No process of tools starts.
    """
    box = _Opened.box
    if box is None:
        raise RuntimeError("a run whose agent calls tools must name them in rollout.tools")
    row_arguments = session.extra_info.get(TOOLS_KWARGS) or {}
    clock = asyncio.create_task(_hold_clock(session))
    try:
        texts = await asyncio.gather(*(box.call(call, row_arguments) for call in calls))
    finally:
        clock.cancel()
        session.restart_clock()
    return [
        {
            "role": "tool",
            "name": call.name,
            "content": text,
            "tool_call_id": f"call{number:05d}",  # some templates want nine letters or digits
        }
        for number, (call, text) in enumerate(zip(calls, texts, strict=True))
    ]


async def _hold_clock(session: Session) -> None:
    while True:
        session.restart_clock()
        await asyncio.sleep(HELD_S)


@register_agent("single_turn_agent")  # verl's name of what has no tools
class SingleTurnAgent:
    """Lets the model say one turn."""

    async def run(self, session: Session) -> None:
        """Lead one conversation."""
        await session.say()


@register_agent("tool_agent")  # verl's name
@register_agent("tools")
class ToolAgent:
    """Lets the model call `rollout.tools` until a turn has no calls."""

    async def run(self, session: Session) -> None:
        """Lead one conversation."""
        turn = await session.say()
        while turn.tool_calls:
            session.give(await call_tools(session, turn.tool_calls))
            turn = await session.say()
