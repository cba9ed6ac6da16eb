"""Requests over HTTP: which are turns of a conversation, and what others do to it."""

import asyncio
import http.client
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from mindspeed_rlxf.agents.endpoint import Endpoint
from mindspeed_rlxf.agents.gateway import Gateway
from mindspeed_rlxf.agents.live_session import Move
from mindspeed_rlxf.agents.loop import AgentLoop
from mindspeed_rlxf.rollout.rollout_engine import FinishReason, GenerationResult
from tests.unit.agents.served import Client, read
from tests.unit.agents.test_loop import EOS, TIMEOUT_S, Led, loop, text_of

__all__ = ["loop"]  # a fixture
PROMPT = {"role": "user", "content": "?"}
MORE = {"role": "user", "content": "x"}


class Served(Led):
    """A conversation whose turns a client asks for, until `leave`."""

    def __init__(self, loop: AgentLoop, gateway: Gateway, tokens: int = 20) -> None:
        opened: Future[Endpoint] = Future()

        async def run(session: Any) -> None:
            async with gateway.open(session) as endpoint:
                opened.set_result(endpoint)
                await self.left.wait()

        self.left = asyncio.Event()
        self.dropped: list[Any] = []  # connections, which stay half open
        self.start(loop, run, tokens)
        self.endpoint = opened.result(5)
        self.client = Client(self.endpoint.base_url, self.endpoint.api_key)

    def begin(self, *messages: Any, **fields: Any) -> Any:
        return self.client.begin({"messages": list(messages), **fields})

    def ask(self, text: str, *messages: Any, **fields: Any) -> dict[str, Any]:
        """Ask for a turn, and sample `text`; return the answer's message."""
        connection = self.begin(*messages, **fields)
        self.loop.wait([self.session])
        self.hear_at_once(text)
        status, answer = read(connection)
        assert status == 200, answer
        message: dict[str, Any] = answer["choices"][0]["message"]
        return message

    def hear_at_once(self, text: str) -> None:
        """As `hear`, without waiting for what the agent does next."""
        kept, self.loop = self.loop, NoWait(self.loop)  # type: ignore[assignment]
        self.hear(text)
        self.loop = kept

    def leave(self) -> Any:
        """End the agent; return the row's text, what is not trained in capitals, and the record."""
        self.endpoint.loop.call_soon_threadsafe(self.left.set)
        self.loop.wait([self.session])
        result, record = self.finish()
        return text_of(result), record


class NoWait:
    def __init__(self, loop: AgentLoop) -> None:
        self.deliver = loop.deliver

    def wait(self, sessions: Any) -> None: ...


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    gateway = Gateway("127.0.0.1", ("!",), ("a",))
    yield gateway
    gateway.close()


@pytest.fixture
def served(loop: AgentLoop, gateway: Gateway) -> Served:
    return Served(loop, gateway)


def test_a_request_that_extends_the_chat_is_the_next_turn(served: Served) -> None:
    first = served.ask("a.", PROMPT)
    assert (first["role"], first["content"]) == ("assistant", "a")
    served.ask("b.", PROMPT, first, MORE)
    text, record = served.leave()
    assert text == "a.<Xb." and record.failure is None and record.turns == [(0, 2), (4, 6)]
    assert served.session.messages == [
        PROMPT, {"role": "assistant", "content": "a"}, MORE, {"role": "assistant", "content": "b"}
    ]  # fmt: skip


def test_a_stream_has_the_answer_in_events(served: Served) -> None:
    usage = {"include_usage": True}
    connection = served.begin(PROMPT, stream=True, model="m", max_tokens=2, stream_options=usage)
    served.loop.wait([served.session])
    assert served.session.ask.limit == 2
    served.hear_at_once("ab")
    answer = connection.getresponse()
    assert answer.headers["Content-Type"] == "text/event-stream"
    *events, end = answer.read().decode().strip().split("\n\n")
    assert end == "data: [DONE]"
    parts = [json.loads(event.removeprefix("data: ")) for event in events]
    assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": "ab"}
    assert parts[1]["choices"][0]["finish_reason"] == "length"
    assert parts[2]["usage"] == {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    assert {part["model"] for part in parts} == {"m"}


@pytest.mark.parametrize("place", ["path", "bearer"])
def test_a_wrong_token_is_refused(served: Served, place: str) -> None:
    url, key = served.endpoint.base_url, served.endpoint.api_key
    wrong = key[:-1] + ("a" if key[-1] != "a" else "b")
    client = Client(url.replace(key, wrong), wrong) if place == "path" else Client(url, wrong)
    assert client.post(messages=[PROMPT])[0] == 401
    assert served.session.move is Move.AGENT, "nothing was asked for"


@pytest.mark.parametrize(("token", "route", "status"), [("wrong", "chat/completions", 401),
                                                       (None, "embeddings", 404)])  # fmt: skip
def test_a_request_is_refused_before_its_body_is_read(
    served: Served, token: str | None, route: str, status: int
) -> None:
    url, key = served.client.url, served.endpoint.api_key
    head = f"POST {url.path}/{route} HTTP/1.1\r\nAuthorization: Bearer {token or key}\r\n"
    with socket.create_connection(("127.0.0.1", url.port or 0), 5.0) as connection:
        connection.sendall(f"{head}Content-Length: {2**25}\r\n\r\n".encode())
        answer = connection.recv(2**16)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())


def test_other_methods_are_refused_as_other_routes(served: Served) -> None:
    url = served.client.url
    with closing(http.client.HTTPConnection("127.0.0.1", url.port, timeout=30.0)) as connection:
        connection.request("GET", f"{url.path}/models")
        answer = connection.getresponse()
        assert answer.status == 404 and "error" in json.loads(answer.read())


def test_a_client_that_sends_a_long_body_sees_why_it_is_refused(served: Served) -> None:
    url = served.client.url
    with closing(http.client.HTTPConnection("127.0.0.1", url.port, timeout=30.0)) as connection:
        for _ in range(2):  # and its connection is kept
            headers = {"Authorization": "Bearer wrong"}
            connection.request("POST", f"{url.path}/chat/completions", b" " * 2**24, headers)
            answer = connection.getresponse()
            assert (answer.status, json.loads(answer.read())["error"]["code"]) == (
                401, "invalid_api_key",
            )  # fmt: skip


def test_a_token_ends_with_its_conversation(served: Served) -> None:
    served.ask("a.", PROMPT)
    served.leave()
    assert served.client.post(messages=[PROMPT])[0] == 401


def test_a_request_equal_to_the_pending_one_joins_it(served: Served) -> None:
    connections = [served.begin(PROMPT) for _ in range(3)]
    served.loop.wait([served.session])
    time.sleep(0.2)  # for the others
    served.hear_at_once("a.")
    answers = [read(connection) for connection in connections]
    assert {status for status, _ in answers} == {200}
    assert len({answer["id"] for _, answer in answers}) == 1
    assert served.leave()[0] == "a."


def test_another_request_beside_a_pending_one_is_refused(served: Served) -> None:
    connection = served.begin(PROMPT)
    served.loop.wait([served.session])
    status, answer = served.client.post(messages=[PROMPT, MORE])
    assert status == 409 and answer["error"]["code"] == "pending"
    served.hear_at_once("a.")
    assert read(connection)[0] == 200
    text, record = served.leave()
    assert text == "a." and record.failure is None


def test_a_replay_of_the_last_turn_samples_it_anew(served: Served) -> None:
    first = served.ask("a.", PROMPT)
    served.ask("bb.", PROMPT, first, MORE)
    assert served.session.ask.attempt == 0
    second = served.ask("c.", PROMPT, first, MORE)
    assert served.session.ask.attempt == 1, "its random numbers are others"
    assert second["content"] == "c"
    begun = served.session.ask.begun
    assert begun is not None and len(begun.tokens) == len(begun.log_probs) == 4
    status, answer = served.client.post(messages=[PROMPT, first, MORE, second, MORE])
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
    text, record = served.leave()
    assert text == "a.<Xc." and record.turns == [(0, 2), (4, 6)] and record.failure is None
    assert [message["content"] for message in served.session.messages[1:4]] == ["a", "x", "c"]


def test_a_rewritten_chat_is_refused_and_its_sample_is_not_trained(served: Served) -> None:
    served.ask("a.", PROMPT)
    other = {"role": "assistant", "content": "b"}
    status, answer = served.client.post(messages=[PROMPT, other, MORE])
    assert status == 409 and "message 1" in answer["error"]["message"]
    assert served.client.post(messages=[PROMPT])[0] == 409
    text, record = served.leave()
    assert text == "A." and record.failure.cause == "rewrite"


def drop(served: Served, *messages: Any) -> None:
    """Ask for a turn, and hang up before it is sampled; what is written then gets lost."""
    connection = served.begin(*messages)
    served.loop.wait([served.session])
    connection.sock.shutdown(socket.SHUT_WR)
    served.dropped.append(connection)
    time.sleep(0.1)


def test_a_client_that_comes_back_gets_the_turn_of_its_dropped_connection(served: Served) -> None:
    drop(served, PROMPT)
    served.hear_at_once("a.")
    time.sleep(0.1)
    assert served.client.say([PROMPT])["content"] == "a"
    text, record = served.leave()
    assert text == "a." and record.failure is None


def test_an_answer_that_nobody_got_is_no_part_of_the_chat(served: Served) -> None:
    first = served.ask("a.", PROMPT)
    drop(served, PROMPT, first, MORE)
    served.hear_at_once("b.")
    time.sleep(0.1)
    other = {"role": "user", "content": "y"}
    assert served.ask("c.", PROMPT, first, other)["content"] == "c"
    text, record = served.leave()
    assert text == "a.<Yc." and record.failure is None


def test_an_agent_that_ends_while_a_turn_is_sampled_answers_its_client(served: Served) -> None:
    connection = served.begin(PROMPT)
    served.loop.wait([served.session])
    served.endpoint.loop.call_soon_threadsafe(served.left.set)
    status, answer = read(connection)
    assert status == 409 and answer["error"]["code"] == "conversation_ended"
    served.hear("a.")
    assert text_of(served.finish()[0]) == "a."


def test_a_client_that_does_not_come_back_ends_by_the_timeout(served: Served) -> None:
    drop(served, PROMPT)
    assert served.session.failure is None
    served.hear_at_once("a.")
    began = time.monotonic()
    served.loop.wait([served.session])
    assert TIMEOUT_S * 0.8 < time.monotonic() - began < TIMEOUT_S + 5
    assert served.finish()[1].failure.cause == "timeout"
    assert served.client.post(messages=[PROMPT])[0] == 401


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": []},
        {"messages": [{"content": "?"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [PROMPT], "n": 2},
        {"messages": [PROMPT], "max_tokens": 0.5},
        {"messages": [PROMPT], "stop": ["!", "\n"]},
        {"messages": [PROMPT], "tools": [{"type": "function", "function": {"name": "b"}}]},
        {"messages": [PROMPT], "response_format": {"type": "json_object"}},
    ],
)
def test_a_request_that_is_refused_changes_nothing(served: Served, fields: Any) -> None:
    assert served.client.post(**fields)[0] == 400
    served.ask("a.", PROMPT, n=1, stop="!", temperature=0.1, tools=[tool("a")])
    assert served.leave()[0] == "a."


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {}}}


def test_calls_are_apart_from_the_text_and_their_results_have_names(served: Served) -> None:
    answer = served.ask("a!.", PROMPT)
    (call,) = answer["tool_calls"]
    assert answer["content"] is None and call["function"] == {"name": "a", "arguments": "{}"}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "r"}
    sent = {"role": "assistant", "tool_calls": [call]}  # as clients leave out null
    served.ask("b.", PROMPT, sent, result)
    text, record = served.leave()
    assert text == "a!.<Rb." and record.num_tool_calls == 1
    assert served.session.messages[2]["name"] == "a"


def test_a_reward_is_the_sessions(served: Served) -> None:
    served.ask("a.", PROMPT)
    assert served.client.post("/reward", score=0.5, form=1.0)[0] == 200
    assert served.client.post("/reward", score="no")[0] == 400
    assert served.client.post("/reward", score=float("nan"))[0] == 400
    record = served.leave()[1]
    assert record.score == 0.5 and record.parts == {"form": 1.0}


def test_a_client_that_fails_as_no_turn_is_left_is_no_failure(
    loop: AgentLoop, gateway: Gateway
) -> None:
    served = Served(loop, gateway, tokens=3)
    first = served.ask("abc", PROMPT)
    assert served.client.post(messages=[PROMPT, first, MORE])[0] == 400
    assert served.client.post(messages=[PROMPT, first, MORE])[0] == 400, "a retry"
    text, record = served.leave()
    assert text == "abc" and record.failure is None


def test_nothing_is_printed_that_holds_a_token(served: Served, capfd: Any) -> None:
    served.ask("a.", PROMPT)
    Client(served.endpoint.base_url, "wrong").post(messages=[PROMPT])
    with socket.create_connection(("127.0.0.1", served.client.url.port or 0)) as connection:
        connection.sendall(f"NONSENSE /{served.endpoint.api_key} HTTP/9\r\n\r\n".encode())
        connection.recv(1000)
    served.leave()
    printed = capfd.readouterr()
    assert printed.out + printed.err == ""


def sample_policy(session: Any) -> GenerationResult:
    """Sample one to three characters and an EOS, which depend on the row so far."""
    begun = session.ask.begun
    tokens = list(begun.tokens) if begun else []
    state = session.sample_id + sum((place + 1) * token for place, token in enumerate(tokens))
    new = [97 + (state + place) % 26 for place in range(1 + state % 3)]
    tokens += [*new, EOS]
    return GenerationResult(0, tokens, [-0.5] * len(tokens), FinishReason.STOP, 0)


def lead_all(loop: AgentLoop, sessions: list[Any]) -> list[list[int]]:
    """Sample until all conversations have ended; return their rows."""
    left = sessions
    while left:
        loop.wait(left)
        left = [session for session in left if session.move is Move.POLICY]
        for session in left:
            loop.deliver(session, sample_policy(session))
    return [session.finish(0, 0)[0].tokens for session in sessions]


def test_sixty_four_conversations_at_once_have_the_ids_of_agents_in_the_process(
    gateway: Gateway,
) -> None:
    loop = AgentLoop(20.0)
    executor = ThreadPoolExecutor(64)

    def talk(endpoint: Endpoint, sample_id: int) -> None:
        client, messages = Client(endpoint.base_url, endpoint.api_key), endpoint.messages
        for number in range(1 + sample_id % 3):
            answer = client.say(messages)
            messages = [*messages, answer, {"role": "user", "content": f"{number}{sample_id}"}]

    async def through_gateway(session: Any) -> None:
        async with gateway.open(session) as endpoint:
            work = executor.submit(talk, endpoint, session.sample_id)
            await asyncio.wrap_future(work)

    async def in_process(session: Any) -> None:
        for number in range(1 + session.sample_id % 3):
            await session.say()
            session.give([{"role": "user", "content": f"{number}{session.sample_id}"}])

    rows = []
    for run in (through_gateway, in_process):
        sessions = []
        for sample_id in range(64):
            led = Led.__new__(Led)
            led.start(loop, run, 60, sample_id)
            sessions.append(led.session)
        rows.append(lead_all(loop, sessions))
    executor.shutdown()
    assert rows[0] == rows[1] and len(set(map(tuple, rows[0]))) == 64
