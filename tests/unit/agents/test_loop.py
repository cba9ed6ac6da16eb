"""Conversations on the event loop: waits, limits of time and tokens, failures and their masks."""

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from mindspeed_rlxf.agents.live_session import Ask, LiveSession, Move, RowLimits
from mindspeed_rlxf.agents.loop import AgentLoop, LoopBlocked
from mindspeed_rlxf.agents.session import SessionEnded, ToolCall, ToolFailed, Turn
from mindspeed_rlxf.rollout.rollout_engine import FinishReason, GenerationResult

EOS, NEWLINE = 0, 10
TIMEOUT_S = 1.0
STEP_S = 0.3


class Characters:
    """A dialect in which a token is the code of a character, and a turn `c!` a call of c."""

    is_chat = True

    def observation_ids(self, messages: Any, eos_id: int | None) -> list[int]:
        mark = "|<" if eos_id is None else "<"
        return [ord(c) for message in messages for c in mark + message["content"]]

    def opening_ids(self, messages: Any, gives_first: bool) -> list[int]:
        return self.observation_ids(messages, None)

    def turn_text(self, token_ids: Any, has_ended: bool) -> str:
        return "".join(chr(i) for i in token_ids if i != EOS)

    def tool_calls(self, text: str) -> list[ToolCall]:
        return [ToolCall(text[:-1])] if text.endswith("!") else []


class Led:
    """Runs a coroutine as an agent, and gives it turns of the test."""

    def __init__(self, loop: AgentLoop, run: Callable[..., Any], tokens: int = 20) -> None:
        self.start(loop, run, tokens)
        loop.wait([self.session])

    def start(
        self, loop: AgentLoop, run: Callable[..., Any], tokens: int, sample_id: int = 7
    ) -> None:
        self.loop = loop
        limits = RowLimits(tokens, 3, (EOS,))
        dialect: Any = Characters()
        self.session = LiveSession(
            sample_id, "test", [1], [{"role": "user", "content": "?"}], {}, "truth", limits,
            dialect, loop.note_ask,
        )  # fmt: skip
        agent: Any = type("Agent", (), {"run": staticmethod(run)})
        loop.start(self.session, agent)

    def hear(self, text: str, version: int = 0) -> None:
        """Sample this turn; a `.` at its end is an EOS."""
        assert self.session.move is Move.POLICY
        begun = self.session.ask.begun
        new = [EOS if c == "." else ord(c) for c in text]
        tokens = (begun.tokens if begun else []) + new
        reason = FinishReason.STOP if new[-1] == EOS else FinishReason.LENGTH
        log_probs = (begun.log_probs if begun else []) + [-0.5] * len(new)
        versions = (begun.versions if begun else []) + [version] * len(new)
        result = GenerationResult(3, tokens, log_probs, reason, version, versions)
        self.loop.deliver(self.session, result)
        self.loop.wait([self.session])

    def finish(self) -> tuple[GenerationResult, Any]:
        assert self.session.move is Move.NONE
        return self.session.finish(3, 5)


@pytest.fixture
def loop() -> Iterator[AgentLoop]:
    yield AgentLoop(TIMEOUT_S)


def text_of(result: GenerationResult) -> str:
    """The row, with observations in capitals."""
    pairs = zip(result.tokens, result.token_trained, strict=True)
    characters = [("." if i == EOS else chr(i), is_trained) for i, is_trained in pairs]
    return "".join(c if is_trained else c.upper() for c, is_trained in characters)


def test_turns_are_trained_and_observations_between_them_are_not(loop: AgentLoop) -> None:
    turns: list[Turn] = []

    async def run(session: Any) -> None:
        turns.append(await session.say())
        session.reward(0.5, form=1.0)
        session.give([{"role": "tool", "content": "x"}, {"role": "user", "content": "y"}])
        turns.append(await session.say(3))
        session.reward(1.0, form=1.0)
        session.give([{"role": "user", "content": "never read"}])

    led = Led(loop, run)
    assert led.session.ask == Ask(None, 20)
    led.hear("ab!.", version=1)
    ask = led.session.ask
    assert ask.begun is not None and ask.limit == 8 + 3
    assert ask.begun.log_probs == [-0.5] * 4 + [0.0] * 4
    led.hear("cd", version=2)
    result, record = led.finish()
    assert text_of(result) == "ab!.<X<Ycd"
    assert result.finish_reason is FinishReason.STOP, "the agent ends it, though its turn was cut"
    assert result.versions == [1] * 4 + [2] * 6, "an observation has the version of the next turn"
    assert result.place == 3 and result.weights_version == 2
    assert record.turns == [(0, 4), (8, 10)] and record.rewards == [0.5, 1.0]
    assert record.parts == {"form": 2.0} and record.num_tool_calls == 1 and record.failure is None
    assert turns[0].text == "ab!" and turns[0].tool_calls == [ToolCall("ab")]
    roles = [message["role"] for message in led.session.messages]
    assert roles == ["user", "assistant", "tool", "user", "assistant", "user"]


def test_an_empty_turn_is_a_trained_eos(loop: AgentLoop) -> None:
    async def run(session: Any) -> None:
        turn = await session.say()
        assert turn.text == "" and turn.finish_reason is FinishReason.STOP

    led = Led(loop, run)
    led.hear(".")
    result, record = led.finish()
    assert text_of(result) == "." and result.trained is None and record.failure is None
    assert result.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("observation", "text"),
    [("o" * 8, "aaaaaaaaaa|<OOOOOOOOb"), ("o" * 10, "aaaaaaaaaa"), ("o" * 50, "aaaaaaaaaa")],
)
def test_a_row_that_is_full_ends_without_eos_and_without_the_observation_behind_it(
    loop: AgentLoop, observation: str, text: str
) -> None:
    """21 tokens: ten, an observation of 10 to 52, and what is left."""

    async def run(session: Any) -> None:
        while True:
            await session.say()
            session.reward(1.0)
            session.give([{"role": "tool", "content": observation}])

    led = Led(loop, run, tokens=21)
    led.hear("a" * 10)
    if led.session.move is Move.POLICY:
        led.hear("b")
    result, record = led.finish()
    assert text_of(result) == text and result.finish_reason is FinishReason.LENGTH
    assert sum(result.token_trained) == text.count("a") + text.count("b")
    assert record.failure is None and record.score == len(record.turns)


def test_the_last_turn_ends_the_sample_without_eos(loop: AgentLoop) -> None:
    ended: list[SessionEnded] = []

    async def run(session: Any) -> None:
        try:
            while True:
                await session.say()
        except SessionEnded as end:
            ended.append(end)
        session.reward(2.0)

    led = Led(loop, run)
    for _ in range(3):
        led.hear("a.")
    result, record = led.finish()
    assert len(ended) == 1 and text_of(result) == "a.a.a." and record.rewards == [0, 0, 2.0]
    assert result.finish_reason is FinishReason.LENGTH and result.trained is None


async def raise_at_once(session: Any) -> None:
    raise KeyError("nothing")


async def raise_later(session: Any) -> None:
    await session.say()
    raise KeyError("nothing")


async def lose_a_tool(session: Any) -> None:
    await session.say()
    raise ToolFailed("killed")


async def hang(session: Any) -> None:
    await session.say()
    await asyncio.sleep(100)


async def cling(session: Any) -> None:
    """Goes on after it was given up."""
    await session.say()
    while True:
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            session.give([{"role": "user", "content": "?"}])
            await session.say()


async def leave(session: Any) -> None:
    await session.say()
    sys.exit("done")


async def say_nothing(session: Any) -> None:
    session.reward(1.0)


async def say_twice_in_turn(session: Any) -> None:
    await session.say()
    await session.say()


async def say_twice_at_once(session: Any) -> None:
    await asyncio.gather(session.say(), session.say())


async def give_up_waiting(session: Any) -> None:
    """Abandons a turn that is sampled."""
    await asyncio.wait_for(session.say(), 0.05)


async def reward_nan(session: Any) -> None:
    await session.say()
    session.reward(float("nan"))


@pytest.mark.parametrize(
    ("run", "cause", "text"),
    [
        (raise_at_once, "exception", "."),
        (raise_later, "exception", "A!."),
        (leave, "exception", "A!."),
        (lose_a_tool, "tool", "A!."),
        (hang, "timeout", "A!."),
        (cling, "timeout", "A!."),
        (say_nothing, "no_turn", "."),
        (say_twice_at_once, "exception", "A!."),
        (give_up_waiting, "exception", "A!."),
        (reward_nan, "exception", "A!."),
    ],
)
def test_a_failed_conversation_has_no_trained_token(
    loop: AgentLoop, run: Callable[[Any], Coroutine[Any, Any, None]], cause: str, text: str
) -> None:
    began = time.monotonic()
    led = Led(loop, run)
    time.sleep(0.15)  # for `give_up_waiting`
    if led.session.move is Move.POLICY:
        led.hear("a!.")
    result, record = led.finish()
    assert time.monotonic() - began < TIMEOUT_S + 5
    assert text_of(result) == text and not any(result.token_trained)
    assert len(result.log_probs) == len(result.token_versions) == len(result.tokens)
    assert result.finish_reason is FinishReason.LENGTH
    assert record.failure is not None and record.failure.cause == cause
    if cause in ("exception", "timeout"):
        assert run.__name__ in record.failure.details, "the traceback or stack is of the agent"


def test_an_error_of_a_parser_reaches_the_agent_that_waits(
    loop: AgentLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_dialect: Any, _text: str) -> list[ToolCall]:
        raise ValueError("no parser")

    monkeypatch.setattr(Characters, "tool_calls", fail)
    led = Led(loop, say_twice_in_turn)
    began = time.monotonic()
    led.hear("a.")
    assert time.monotonic() - began < TIMEOUT_S / 2
    failure = led.finish()[1].failure
    assert failure is not None and failure.message == "ValueError: no parser"


def test_a_row_that_is_full_with_its_last_turn_has_no_end(loop: AgentLoop) -> None:
    """As a response without an agent."""
    led = Led(loop, say_twice_in_turn, tokens=5)
    led.hear("ab")
    led.hear("cde")
    assert led.finish()[0].finish_reason is FinishReason.LENGTH


def test_a_conversation_that_hangs_lets_others_go_on(loop: AgentLoop) -> None:
    async def run(session: Any) -> None:
        await session.say()

    hanging, other = Led(loop, hang), Led(loop, run)
    hanging.session.moved_at = time.monotonic()
    loop.deliver(hanging.session, GenerationResult(0, [65], [0.0], FinishReason.LENGTH, 0))
    other.hear("b")
    assert other.session.move is Move.NONE and hanging.session.move is Move.AGENT
    loop.wait([hanging.session])
    assert hanging.finish()[1].failure.cause == "timeout"


def test_an_agent_that_blocks_the_loop_ends_the_run_by_name() -> None:
    loop = AgentLoop(STEP_S)
    stop = False

    async def spin_for_ever(session: Any) -> None:
        while not stop:
            time.sleep(0.01)

    with pytest.raises(LoopBlocked, match=r"'test', sample 7") as raised:
        Led(loop, spin_for_ever)
    stop = True
    assert "spin_for_ever" in str(raised.value)


def test_a_blocked_loop_is_no_fault_of_those_who_wait_for_it() -> None:
    """A short block over the deadline of another conversation."""
    loop = AgentLoop(STEP_S)

    async def block(session: Any) -> None:
        await session.say()
        time.sleep(0.8 * STEP_S)

    async def wait(session: Any) -> None:
        await session.say()
        await asyncio.sleep(0.5 * STEP_S)
        await session.say()

    waiting, blocking = Led(loop, wait), Led(loop, block)
    answer = GenerationResult(0, [65], [0.0], FinishReason.LENGTH, 0)
    loop.deliver(waiting.session, answer)
    time.sleep(0.3 * STEP_S)
    loop.deliver(blocking.session, answer)
    loop.wait([waiting.session, blocking.session])
    assert waiting.session.move is Move.POLICY and blocking.session.move is Move.NONE
    assert blocking.finish()[1].failure is None
