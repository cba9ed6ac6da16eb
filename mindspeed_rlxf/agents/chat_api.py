"""Requests of OpenAI's chat API, and its answers."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from mindspeed_rlxf.agents.session import Message, ToolCall, Turn
from mindspeed_rlxf.agents.tool_calls import text_before_calls
from mindspeed_rlxf.rollout.rollout_engine import FinishReason

Identity: TypeAlias = tuple[str, str, tuple[tuple[str, str], ...]]
"""What makes two messages the same one: role, text, and (name, arguments as JSON) of its calls."""

ROLES = {"system", "user", "assistant", "tool"}
DEFAULTS: dict[str, Any] = {
    "n": 1,
    "logprobs": False,
    "tool_choice": "auto",
    "response_format": {"type": "text"},
}
"""Parameters that may have this value alone. Others, as `temperature`, are the run's own."""


class ChatError(Exception):
    """A request that is refused.

    Attributes:
        status: Of HTTP.
        code: Of OpenAI's API.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        """Set status and code, and a message for the client."""
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True)
class ChatRequest:
    """A request for a turn.

    Attributes:
        messages: As chat templates take them.
        max_tokens: Most tokens of the turn; None = what the budget leaves.
        tools: Names of the tools that the client offers.
        stop: Strings that end the turn.
        model: The name that the client gives the policy.
        stream: Whether the answer is a stream of events.
        stream_usage: Whether its last event has the counts of tokens.
    """

    messages: list[Message]
    max_tokens: int | None = None
    tools: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    model: str = ""
    stream: bool = False
    stream_usage: bool = False

    @classmethod
    def parse(cls, body: bytes) -> ChatRequest:
        """Read a request's JSON.

        Raises:
            ChatError: It is malformed, or asks for what a policy in training cannot do.
        """
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError):
            raise _wrong("the body must be JSON") from None
        if not isinstance(fields, dict):
            raise _wrong("the body must be a JSON object")
        for name, default in DEFAULTS.items():
            if fields.get(name) not in (None, default):
                raise _wrong(f"{name} must be {json.dumps(default)} or absent")
        limit = fields.get("max_completion_tokens") or fields.get("max_tokens")
        if limit is not None and (type(limit) is not int or limit < 1):
            raise _wrong("max_tokens must be an integer of 1 or more")
        stop = fields.get("stop") or []
        messages = fields.get("messages")
        if not isinstance(messages, list) or not messages:
            raise _wrong("messages must be a list with a message")
        try:
            tools = tuple(str(tool["function"]["name"]) for tool in fields.get("tools") or [])
            return cls(
                read_messages(messages),
                limit,
                tools,
                (stop,) if isinstance(stop, str) else tuple(map(str, stop)),
                str(fields.get("model") or ""),
                bool(fields.get("stream")),
                bool((fields.get("stream_options") or {}).get("include_usage")),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise _wrong(f"a message or tool is malformed: {error!r:.200}") from None

    @property
    def identities(self) -> list[Identity]:
        """The messages, for comparison."""
        return [identity_of(message) for message in self.messages]

    def check(self, stop_strings: Collection[str], tools: Collection[str]) -> None:
        """Raise ChatError if the request has stop strings or tools that the run has not."""
        unknown_stops = set(self.stop) - set(stop_strings)
        if unknown_stops:
            listed = sorted(unknown_stops)
            raise _wrong(f"stop must be among actor_rollout.stop_strings; not {listed!r:.200}")
        unknown_tools = set(self.tools) - set(tools)
        if unknown_tools:
            listed = sorted(unknown_tools)
            raise _wrong(f"tools must be among rollout.tools; not {listed!r:.200}")


def _wrong(message: str) -> ChatError:
    return ChatError(400, "invalid_request_error", message)


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return messages with text as content, arguments as objects, and names at tools' results."""
    tool_names: dict[str, str] = {}  # by the id of the call
    read: list[Message] = []
    for sent in messages:
        role = "system" if sent["role"] == "developer" else sent["role"]
        if role not in ROLES:
            raise _wrong(f"the role of a message must be one of {', '.join(sorted(ROLES))}")
        message: Message = {"role": role, "content": _text_of(sent.get("content"))}
        calls = []
        for call in sent.get("tool_calls") or []:
            name = str(call["function"]["name"])
            tool_names[str(call.get("id"))] = name
            arguments = _read_arguments(call["function"].get("arguments"))
            function = {"name": name, "arguments": arguments}
            calls.append({"type": "function", "id": call.get("id"), "function": function})
        if calls:
            message["tool_calls"] = calls
        if role == "tool":
            call_id = str(sent.get("tool_call_id") or "")
            message["tool_call_id"] = call_id
            message["name"] = str(sent.get("name") or tool_names.get(call_id, "tool"))
        read.append(message)
    return read


def _text_of(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if any(part["type"] not in ("text", "input_text") for part in content):
        raise _wrong("the parts of a content must be text")
    return "".join(str(part["text"]) for part in content)


def _read_arguments(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments


def identity_of(message: Message) -> Identity:
    """Return what makes a message another one."""
    calls = [call["function"] for call in message.get("tool_calls") or []]
    names_and_arguments = [
        (call["name"], json.dumps(call["arguments"], sort_keys=True)) for call in calls
    ]
    return message["role"], str(message.get("content") or ""), tuple(names_and_arguments)


def answer_message(turn: Turn, num_calls_before: int) -> Message:
    """Return a turn as the message that clients get, and send with their next request.

    Calls of tools are apart from its text, unless one of them is malformed.
    """
    calls = turn.tool_calls
    if not calls or any(call.problem for call in calls):
        return {"role": "assistant", "content": turn.text}
    numbered = enumerate(calls, num_calls_before)
    return {
        "role": "assistant",
        "content": text_before_calls(turn.text),
        "tool_calls": [_call_entry(number, call) for number, call in numbered],
    }


def _call_entry(number: int, call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    # Some templates want nine letters or digits.
    return {"id": f"call{number:05d}", "type": "function", "function": function}


@dataclass(frozen=True)
class Completion:
    """An answered request.

    Attributes:
        identifier: Of the turn within the run.
        message: The turn (`answer_message`).
        finish_reason: stop, length or tool_calls.
        num_prompt_tokens: Tokens of the row before the turn.
        num_tokens: Tokens of the turn.
    """

    identifier: str
    message: Message
    finish_reason: str
    num_prompt_tokens: int
    num_tokens: int

    @classmethod
    def of(
        cls, turn: Turn, message: Message, identifier: str, num_prompt_tokens: int
    ) -> Completion:
        """Return the answer with a turn."""
        reason = "stop" if turn.finish_reason is FinishReason.STOP else "length"
        if "tool_calls" in message:
            reason = "tool_calls"
        return cls(identifier, message, reason, num_prompt_tokens, len(turn.token_ids))

    def to_json(self, model: str) -> bytes:
        """Return the body of an answer."""
        message = {**self._sent_message, "refusal": None}
        choice = {"index": 0, "message": message, "finish_reason": self.finish_reason}
        head = self._head("chat.completion", model)
        return json.dumps({**head, "choices": [choice], "usage": self._usage}).encode()

    def to_events(self, model: str, with_usage: bool = False) -> bytes:
        """Return the body of a stream: the message in one event, its end, and perhaps counts."""
        delta = self._sent_message
        if "tool_calls" in delta:
            calls = [{"index": index, **call} for index, call in enumerate(delta["tool_calls"])]
            delta = {**delta, "tool_calls": calls}
        head = self._head("chat.completion.chunk", model)
        events = [
            {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
            {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": self.finish_reason}]},
        ]
        if with_usage:
            events.append({**head, "choices": [], "usage": self._usage})
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        return "".join([*lines, "data: [DONE]\n\n"]).encode()

    @property
    def _sent_message(self) -> Message:
        """The message with arguments as JSON in JSON, and null for no text beside calls."""
        if "tool_calls" not in self.message:
            return self.message
        calls = []
        for call in self.message["tool_calls"]:
            arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            calls.append({**call, "function": {**call["function"], "arguments": arguments}})
        return {**self.message, "content": self.message["content"] or None, "tool_calls": calls}

    def _head(self, kind: str, model: str) -> dict[str, Any]:
        return {
            "id": self.identifier,
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    @property
    def _usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_tokens,
        }
