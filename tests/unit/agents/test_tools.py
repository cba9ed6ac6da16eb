"""Whatever a call or a tool does, the model gets a message, or its sample is not trained."""

import asyncio
import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mindspeed_rlxf.agents.session import SessionEnded, ToolCall, ToolFailed
from mindspeed_rlxf.agents.tool_calls import parse_tool_calls
from mindspeed_rlxf.agents.tools import ToolAgent, ToolBox, close_tools, open_tools, tool_schemas
from mindspeed_rlxf.config.plugins import complete_tool
from mindspeed_rlxf.config.problems import UserError
from mindspeed_rlxf.config.reward_section import RewardConfig, SandboxConfig
from mindspeed_rlxf.config.rollout_section import RolloutConfig
from tests.unit.agents.said_session import SaidSession

FILE = Path(__file__).with_name("own_tools.py")
FUNCTIONS = ("add", "look_up", "wait", "misbehave")


def rollout_of(*tools: str, **keys: Any) -> RolloutConfig:
    entries = [complete_tool("rollout.tools", tool) for tool in tools]
    return RolloutConfig.model_validate({"tools": entries, **keys})


REWARD = RewardConfig(sandbox=SandboxConfig(unsafe=True))


@pytest.fixture(scope="module")
def box() -> Iterator[ToolBox]:
    names = [f"{FILE}:{name}" for name in FUNCTIONS]
    box = open_tools(rollout_of(*names, "python", tool_processes=2), REWARD)
    yield box
    close_tools()


def call(box: ToolBox, name: str, arguments: Any, row: Any = None) -> str:
    return asyncio.run(box.call(ToolCall(name, arguments), row or {}))


def test_calls_return_what_the_model_reads(box: ToolBox) -> None:
    row = {"look_up": {"create_kwargs": {"table": {"a": "b"}, "other": 1}, "execute_kwargs": None}}
    assert call(box, "add", {"a": 1, "b": 2}) == "3"
    assert call(box, "wait", {"seconds": 0.5}) == '{"waited": 0.5}'
    assert call(box, "look_up", {"key": "a"}, row) == "b"
    assert call(box, "look_up", {"key": "a"}, {"look_up": {"table": {"a": "c"}}}) == "c"
    assert call(box, "python", {"code": "print(6 * 7)"}) == "42\n"


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def test_a_wrong_call_and_an_exception_are_messages(box: ToolBox) -> None:
    for name, arguments, said in (
        ("subtract", {}, "there is no tool 'subtract'; there is add"),
        ("add", {"a": 1, "c": 2}, "add has no parameter 'c'; it has a, b"),
        ("add", {"a": 1}, "TypeError: add() missing 1 required positional argument: 'b'"),
        ("look_up", {"key": "a", "table": {}}, "look_up has no parameter 'table'"),
        ("look_up", {"key": "a"}, "TypeError"),
        ("misbehave", {"how": "raise"}, "ZeroDivisionError: of this tool"),
        ("add", {"a": nested(700), "b": 1}, "TypeError"),
        ("add", {"a": nested(100_000), "b": 1}, "nested too deeply"),
        ("python", {"code": "1 / 0"}, "ZeroDivisionError: division by zero"),
        ("python", {"code": "print(1)\nwhile True: print(1)"}, "exceeded the limit output"),
    ):
        text = call(box, name, arguments)
        assert said in text and "Error: " in text, text
    (malformed,) = parse_tool_calls("<tool_call>{</tool_call>")
    assert asyncio.run(box.call(malformed, {})).startswith("Error: the call must be")


def test_a_long_result_loses_its_middle() -> None:
    box = ToolBox(rollout_of(f"{FILE}:look_up", max_tool_response_length=10), REWARD)
    for result, read in (("0123456789", "0123456789"), ("0123456789a", "01234...6789a")):
        text = call(box, "look_up", {"key": "a"}, {"look_up": {"table": {"a": result}}})
        assert text.replace("(truncated)...", "") == read
    box.close()


def test_a_tool_stands_with_its_file_and_its_hash() -> None:
    entry = complete_tool("rollout.tools", f"{FILE}:add")
    text = FILE.read_bytes()
    assert entry == {"function": f"{FILE}:add", "sha256": hashlib.sha256(text).hexdigest()}
    with pytest.raises(UserError, match="sha256"):
        complete_tool("rollout.tools", {**entry, "sha256": "0" * 64})
    assert complete_tool("rollout.tools", "python") == {"function": "python"}


@pytest.mark.parametrize("how", ["exit", "crash", "hang"])
def test_a_tool_that_ends_or_hangs_is_a_message(how: str) -> None:
    """The model may have caused it. One process serves all: it is replaced, nothing stays."""
    names = (f"{FILE}:misbehave", f"{FILE}:add")
    limit = 2.0 if how == "hang" else 60.0
    box = ToolBox(rollout_of(*names, tool_processes=1, turn_timeout_s=limit), REWARD)
    try:
        assert call(box, "add", {"a": 1, "b": 1}) == "2"
        assert call(box, "misbehave", {"how": how}).startswith("Error: ")
        assert call(box, "add", {"a": 1, "b": 2}) == "3"
    finally:
        box.close()
    assert not [p for p in sleepers() if p.is_running()]


def sleepers() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cmdline() == ["sleep", "4242"] and process.status() != "zombie":
                found.append(process)
    return found


def test_a_call_that_nobody_waits_for_is_dropped() -> None:
    """Its place in the queue does not harm the calls behind it."""
    box = ToolBox(rollout_of(f"{FILE}:add", tool_processes=1), REWARD)

    async def call_twice() -> str:
        given_up = asyncio.create_task(box.call(ToolCall("add", {"a": 1, "b": 1}), {}))
        second = asyncio.create_task(box.call(ToolCall("add", {"a": 2, "b": 2}), {}))
        await asyncio.sleep(0)
        given_up.cancel()
        third = asyncio.create_task(box.call(ToolCall("add", {"a": 3, "b": 3}), {}))
        return await asyncio.wait_for(second, 60) + await asyncio.wait_for(third, 60)

    assert asyncio.run(call_twice()) == "46"
    box.close()


def test_tools_that_do_not_start_fail_the_sample(tmp_path: Path) -> None:
    """As a file that runs on the driver alone."""
    file = tmp_path / "absent.py"
    text = FILE.read_text(encoding="utf-8")
    file.write_text(f"import os\nif os.getpid() != {os.getpid()}:\n    raise OSError\n{text}")
    box = ToolBox(rollout_of(f"{file}:add"), REWARD)
    with pytest.raises(ToolFailed, match="OSError"):
        call(box, "add", {"a": 1, "b": 2})
    box.close()


def test_the_clock_of_an_agent_stands_still_while_it_calls(box: ToolBox) -> None:
    session = SaidSession('<tool_call>{"name": "wait", "arguments": {"seconds": 0.5}}', "Done.")
    asyncio.run(ToolAgent().run(session))
    assert session.num_restarts >= 3, "of a call that takes a second"


def test_strings_have_the_same_hashes_in_each_process(tmp_path: Path) -> None:
    file = tmp_path / "hashing.py"
    doc = '    """Hash.\n\n    Args:\n        text: A text.\n    """\n'
    file.write_text(f"def digest(text: str) -> int:\n{doc}    return hash(text)\n")
    texts = []
    for _ in range(2):
        box = ToolBox(rollout_of(f"{file}:digest"), REWARD)
        texts.append(call(box, "digest", {"text": "a"}))
        box.close()
    assert texts[0] == texts[1]


def test_the_agent_answers_calls_until_a_turn_has_none(box: ToolBox) -> None:
    calls = [{"name": "add", "arguments": {"a": n, "b": 1}} for n in (1, 2)]
    calls.append({"name": "look_up", "arguments": {"key": "a"}})
    text = "".join(f"<tool_call>{json.dumps(each)}</tool_call>" for each in calls)
    row = {"tools_kwargs": {"look_up": {"create_kwargs": {"table": {"a": "b"}}}}}
    session = SaidSession(text, "<tool_call>[", "It is 3.", "not said", extra_info=row)
    asyncio.run(ToolAgent().run(session))
    contents = [message["content"] for message in session.messages]
    assert contents[:3] == ["2", "3", "b"] and contents[3].startswith("Error: the call must be")
    assert {message["role"] for message in session.messages} == {"tool"}
    assert session.texts == ["not said"]
    with pytest.raises(SessionEnded):
        asyncio.run(ToolAgent().run(SaidSession(text)))


def test_schemas_leave_out_what_the_row_gives() -> None:
    add, look_up, python = tool_schemas(rollout_of(f"{FILE}:add", f"{FILE}:look_up", "python"))
    assert add["function"]["parameters"]["required"] == ["a", "b"]
    assert add["function"]["description"] == "Add two numbers."
    assert look_up["function"]["parameters"]["properties"] == {
        "key": {"type": "string", "description": "The word."}
    }
    assert python["function"]["name"] == "python"


@pytest.mark.parametrize(
    "tool", [f"{FILE}:undocumented", f"{FILE}:absent", f"{FILE}", "perl", "/x/none.py:f"]
)
def test_a_tool_that_cannot_be_described_is_a_problem(tool: str) -> None:
    with pytest.raises(UserError, match=r"rollout\.tools"):
        complete_tool("rollout.tools", tool)


def test_processes_end_with_a_forgotten_box() -> None:
    before = {process.pid for process in psutil.Process().children()}
    box = ToolBox(rollout_of(f"{FILE}:add"), REWARD)
    assert call(box, "add", {"a": 1, "b": 2}) == "3"
    started = [p for p in psutil.Process().children() if p.pid not in before]
    assert started
    del box
    deadline = time.monotonic() + 10
    while any(p.is_running() and p.status() != "zombie" for p in started):
        assert time.monotonic() < deadline
        time.sleep(0.01)
