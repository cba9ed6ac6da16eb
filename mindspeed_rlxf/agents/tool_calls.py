"""Read the tool calls in a turn's text, as the families of models write them.

    Hermes, Qwen3   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
    Qwen3-Coder     <tool_call><function=add><parameter=a>1</parameter></function></tool_call>
    Seed-OSS        <function=add><parameter=a>1</parameter></function>
    Llama 3         <function=add>{"a": 1}</function>
                    {"name": "add", "parameters": {"a": 1}} as the whole text
    GLM             <tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>
    Mistral         [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}], [TOOL_CALLS]add{"a": 1}
    Phi-4-mini      <|tool_call|>[{"name": "add", "arguments": {"a": 1}}]<|/tool_call|>
                    functools[{"name": "add", "arguments": {"a": 1}}]
    DeepSeek        <|tool_call_begin|>add<|tool_sep|>{"a": 1}<|tool_call_end|> in wide letters,
                    in R1 with `function<|tool_sep|>` before, and the arguments in ```json

A malformed call is a ToolCall with a problem, which the model can be told.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_rlxf.agents.session import ToolCall

HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
DEEPSEEK_CALL = "<\uff5ctool\u2581call\u2581begin\uff5c>"
DEEPSEEK_CALLS = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
MARK = re.compile(rf"\[TOOL_CALLS\]|<\|tool_call\|>|functools(?=\[\s*\{{)|{DEEPSEEK_CALL}")
MARKED_NAME = re.compile(
    rf"\s*(?:\w+{SEPARATOR})?([\w.-]+)\s*"
    rf"(?:\[CALL_ID\]\w*)?(?:\[ARGS\]|{SEPARATOR}|```json)?\s*(?=\{{)"
)
GLM_NAME = re.compile(r"([A-Za-z_][\w.-]*)\s*(?=<arg_key>|\Z)")
GLM_ARGUMENT = re.compile(
    r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)(?:</arg_value>|(?=<arg_key>)|\Z)", re.DOTALL
)
LLAMA_START = re.compile(r"\s*(?:<\|python_(?:tag|start|end)\|>\s*)*(?=\{)")
XML_START = re.compile(r"<function=[^>\n]*>\s*(?=<parameter=|\{|</function>)")
XML_FUNCTION = re.compile(r"<function=([^>\n]*)>(.*?)(?:</function>|\Z)", re.DOTALL)
XML_PARAMETER = re.compile(
    r"<parameter=([^>\n]*)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL
)
CALL_START = re.compile(
    rf"<tool_call>|{DEEPSEEK_CALLS}|{MARK.pattern}|(?:<seed:tool_call>\s*)?{XML_START.pattern}"
)
THOUGHT = re.compile(r"(?s:.*)</(?:seed:)?think>")  # up to the last end of one
START_OF_THOUGHT = re.compile(r"<(?:seed:)?think>")
LAYOUT = 'a JSON object {"name": tool, "arguments": {parameter: value}}'


def parse_tool_calls(
    text: str, tools: Sequence[Mapping[str, Any]] = (), in_thought: bool = False
) -> list[ToolCall]:
    """Return the calls in a turn's text, in order; those inside of a thought do not count.

    Args:
        text: The turn, with special tokens.
        tools: JSON schemas of the tools, which tell the types of parameters in XML.
        in_thought: The turn's header has begun a thought.
    """
    thought = THOUGHT.match(text)
    text = text[thought.end() :] if thought else text
    if START_OF_THOUGHT.search(text) or (in_thought and not thought):  # not ended
        return []
    blocks = HERMES.findall(text)
    if blocks:
        return [call for block in blocks for call in _read_block(block.strip(), tools)]
    if MARK.search(text):
        return _read_marked(text)
    llama_calls = _read_llama(text)
    xml = XML_START.search(text)
    if xml and not llama_calls:
        return _read_xml(text[xml.start() :], tools)
    return llama_calls


def text_before_calls(text: str) -> str:
    """Return the text of a turn before its calls, thoughts included; "" where it is one call."""
    thought = THOUGHT.match(text)
    start = thought.end() if thought else 0
    call = CALL_START.search(text, start)
    return text[: call.start() if call else start].rstrip()


def _read_block(block: str, tools: Sequence[Mapping[str, Any]]) -> list[ToolCall]:
    """Read what stands in <tool_call>: XML, a name with GLM's pairs, or JSON."""
    if block.startswith("<function="):
        return _read_xml(block, tools)
    glm_name = GLM_NAME.match(block)
    if glm_name is not None:
        has_arguments = glm_name.end() < len(block)
        names = [tool.get("function", tool).get("name") for tool in tools]
        if has_arguments or glm_name[1] in names:
            return [_typed_call(glm_name[1], GLM_ARGUMENT.findall(block), tools)]
    return [_read_json(block)]


def _read_json(text: str) -> ToolCall:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return _malformed(f"it is no JSON: {error}")
    return _to_call(value)


def _to_call(value: Any) -> ToolCall:
    """Return the call that a JSON value describes, perhaps an entry of OpenAI's API."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return _malformed("it has no name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # JSON in JSON, as in OpenAI's API
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return _malformed(f"its arguments are no JSON: {error}")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return _malformed("its arguments are no object")
    return ToolCall(value["name"], arguments)


def _read_marked(text: str) -> list[ToolCall]:
    """Read marks with a list of calls behind them, or with a name and its arguments."""
    calls = []
    for call_text in MARK.split(text)[1:]:
        name = MARKED_NAME.match(call_text)
        json_start = name.end() if name else 0
        try:
            value, _ = json.JSONDecoder().raw_decode(call_text[json_start:].lstrip())
        except (ValueError, RecursionError) as error:
            calls.append(_malformed(f"it is no JSON: {error}"))
            continue
        if name:
            value = {"name": name[1], "arguments": value}
        entries = value if isinstance(value, list) else [value]
        calls += [_to_call(entry) for entry in entries]
    return calls


def _read_llama(text: str) -> list[ToolCall]:
    """Read a text that consists of JSON objects with names, perhaps with `;` between them.

    A text that begins in another way, and JSON without a name, is an answer.
    """
    calls: list[ToolCall] = []
    start = LLAMA_START.match(text)
    rest = text[start.end() :] if start else ""
    while rest.startswith("{"):
        try:
            value, end = json.JSONDecoder().raw_decode(rest)
        except (ValueError, RecursionError) as error:
            is_call = calls or '"name"' in rest
            return [*calls, _malformed(f"it is no JSON: {error}")] if is_call else []
        if "name" not in value or not value.keys() & {"parameters", "arguments"}:
            return calls
        calls.append(_to_call(value))
        rest = rest[end:].lstrip("; \n")
    return calls


def _read_xml(text: str, tools: Sequence[Mapping[str, Any]]) -> list[ToolCall]:
    calls = []
    for name, body in XML_FUNCTION.findall(text):
        if not name.strip():
            calls.append(_malformed("no name"))
        elif body.strip().startswith("{"):
            calls.append(_to_call({"name": name.strip(), "arguments": body}))
        else:
            calls.append(_typed_call(name.strip(), XML_PARAMETER.findall(body), tools))
    return calls


def _typed_call(
    name: str, arguments: Sequence[tuple[str, str]], tools: Sequence[Mapping[str, Any]]
) -> ToolCall:
    """Return a call whose arguments are text, or JSON where the tool's schema has another type."""
    types = _parameter_types(name, tools)
    values: dict[str, Any] = {}
    for parameter, text in arguments:
        key = parameter.strip()
        value = text.removeprefix("\n").removesuffix("\n")
        values[key] = value if types.get(key) in ("string", None) else _to_value(value)
    return ToolCall(name, values)


def _parameter_types(name: str, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = function.get("parameters", {}).get("properties", {})
            return {key: schema.get("type") for key, schema in properties.items()}
    return {}


def _to_value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _malformed(reason: str) -> ToolCall:
    return ToolCall("", {}, f"the call must be {LAYOUT}; {reason}")
