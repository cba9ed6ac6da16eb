"""Calls of tools in a turn's text, as families of models write them."""

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from mindspeed_rlxf.agents.session import ToolCall
from mindspeed_rlxf.agents.tool_calls import parse_tool_calls

ADD = {"a": 1, "b": {"c": [2.5, None, "</x> é"]}}
CALL = ToolCall("add", ADD)
JSON = json.dumps({"name": "add", "arguments": ADD})
PARAMETERS = json.dumps({"name": "add", "parameters": ADD})
CODER = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
            },
        },
    }
]


def wide(text: str) -> str:
    """Write marks as DeepSeek does."""
    return re.sub(
        r"<\|(\w+)\|>", lambda m: f"<\uff5ctool\u2581{m[1]}\uff5c>".replace("_", "\u2581"), text
    )


TEXTS = {
    "hermes": (f"I add.\n<tool_call>\n{JSON}\n</tool_call>", [CALL]),
    "hermes twice": (f"<tool_call>{JSON}</tool_call>\n<tool_call>{JSON}</tool_call>", [CALL] * 2),
    "hermes, not closed": (f"<tool_call>{JSON}", [CALL]),
    "hermes after a thought": (f"<think><tool_call>x</think>\n<tool_call>{JSON}", [CALL]),
    "arguments as text": (
        "<tool_call>" + json.dumps({"name": "add", "arguments": json.dumps(ADD)}),
        [CALL],
    ),
    "llama": (PARAMETERS, [CALL]),
    "llama, tagged": (f"<|python_tag|>{PARAMETERS}; {PARAMETERS}", [CALL] * 2),
    "llama 4": (f"<|python_start|><|python_end|>{PARAMETERS}", [CALL]),
    "mistral": (f"[TOOL_CALLS] [{JSON}, {JSON}]", [CALL] * 2),
    "mistral, named": (
        f"[TOOL_CALLS]add[ARGS]{json.dumps(ADD)}[TOOL_CALLS]add{json.dumps(ADD)}",
        [CALL] * 2,
    ),
    "coder": (
        "<tool_call>\n<function=add>\n<parameter=a>\n12\n</parameter>\n<parameter=b>\n3\n4\n"
        "</parameter>\n</function>\n</tool_call>",
        [ToolCall("add", {"a": 12, "b": "3\n4"})],
    ),
    "xml alone": (
        "I add.\n<function=add><parameter=a>12</parameter><parameter=b>3</parameter></function>",
        [ToolCall("add", {"a": 12, "b": "3"})],
    ),
    "llama, in a function": (f"<function=add>{json.dumps(ADD)}</function>", [CALL]),
    "glm": (
        "I add.\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>12</arg_value>\n"
        "<arg_key>b</arg_key>\n<arg_value>3</arg_value>\n</tool_call><tool_call>add</tool_call>",
        [ToolCall("add", {"a": 12, "b": "3"}), ToolCall("add", {})],
    ),
    "phi, as functools": (f"functools[{JSON}]", [CALL]),
    "phi": (f"<|tool_call|>[{JSON}, {JSON}]<|/tool_call|>", [CALL] * 2),
    "deepseek": (
        wide(f"<|calls_begin|><|call_begin|>add<|sep|>{json.dumps(ADD)}<|call_end|>"),
        [CALL],
    ),
    "deepseek r1": (
        wide(f"<|call_begin|>function<|sep|>add\n```json\n{json.dumps(ADD)}\n```<|call_end|>") * 2,
        [CALL] * 2,
    ),
    "an answer": ("It is 12.", []),
    "an answer in JSON": ('{"answer": 12}', []),
    "a thought": (f"<think><tool_call>{JSON}</tool_call>", []),
    "nothing": ("", []),
    "an answer about calls": ("One writes <function=add> and <parameter=a>.", []),
    "seed's thought": ("<seed:think><function=add>{}</function></seed:think>12", []),
    "llama with a mark": (
        '{"name": "add", "parameters": {"b": "<function=f>{}</function>"}}',
        [ToolCall("add", {"b": "<function=f>{}</function>"})],
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_calls_are_read_in_every_form(name: str) -> None:
    text, calls = TEXTS[name]
    assert parse_tool_calls(text, CODER) == calls


def test_a_call_in_a_thought_of_the_header_does_not_count() -> None:
    call = f"<tool_call>{JSON}</tool_call>"
    assert parse_tool_calls(f"I call {call}", in_thought=True) == []
    assert parse_tool_calls(f"I call {call}</think>{call}", in_thought=True) == [CALL]


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "add", "arguments": {"a": 1}',
        "add(1, 2)",
        "reset_database",
        '["add"]',
        '{"arguments": {}}',
        '{"name": 3, "arguments": {}}',
        '{"name": "add", "arguments": [1]}',
        '{"name": "add", "arguments": "a=1"}',
        '{"a":' * 5000,
        "1" * 5000,
        "",
    ],
    ids=lambda body: body[:20],
)
@pytest.mark.parametrize("form", ["<tool_call>{}</tool_call>", "[TOOL_CALLS]{}", "<|tool_call|>{}"])
def test_a_malformed_call_has_a_problem(form: str, body: str) -> None:
    good, bad = f"<tool_call>{JSON}</tool_call>", form.replace("{}", body, 1)
    (call,) = parse_tool_calls(bad)
    assert call.name == "" and call.problem
    if "</tool_call>" in form:
        assert [bool(call.problem) for call in parse_tool_calls(bad + good)] == [True, False]


TAGS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<function=f>", "<parameter=p>", "[TOOL_CALLS]", "</think>",
     "<|tool_call|>", "<arg_key>", "</arg_key>", "<arg_value>", "f",
     "{", "}", "[", "]", '"name"', '"arguments"', ":", ",", "1", "<|python_tag|>", "\n", "[ARGS]"]
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(TAGS | st.text(max_size=3), max_size=12).map("".join))
def test_no_text_raises(text: str) -> None:
    calls: list[Any] = parse_tool_calls(text, CODER)
    assert all(bool(call.name) != bool(call.problem) for call in calls)
