"""Agents of tests, also as a plugin: on sums such as `12+34=`, whose answer they give."""

import asyncio
from typing import Any

from mindspeed_rlxf.agents.session import AGENTS, Session, ToolCall
from mindspeed_rlxf.agents.tools import call_tools


class OneTurn:
    """Says one turn, as a run without agent does."""

    async def run(self, session: Session) -> None:
        await session.say()


class TwoTurns:
    """Gives the answer behind a short first turn; both turns have rewards."""

    async def run(self, session: Session) -> None:
        first = await session.say(3)
        session.reward(0.25 * first.text.count("1"), ones=float(first.text.count("1")))
        session.give([{"role": "tool", "content": "=" + session.ground_truth}])
        await self.say_last(session)

    async def say_last(self, session: Session) -> None:
        turn = await session.say()
        session.reward(float(session.ground_truth in turn.text))


class Late(TwoTurns):
    """The same, with delays."""

    async def run(self, session: Session) -> None:
        await asyncio.sleep(0.02 * (session.sample_id % 3))
        await super().run(session)
        await asyncio.sleep(0.02 * (session.sample_id % 5))


class Noisy(TwoTurns):
    """The same, with log-probs of observations that nobody may read."""

    async def say_last(self, session: Any) -> None:
        await super().say_last(session)
        for token, is_trained in enumerate(session._trained):
            if not is_trained:
                session._log_probs[token] = -7.0 + token


class Failing(TwoTurns):
    """Raises for every ninth sample, and is late for another."""

    async def run(self, session: Session) -> None:
        if session.sample_id % 9 == 4:
            raise OSError("no database")
        await super().run(session)
        if session.sample_id == 5:
            await asyncio.sleep(100)


class Calculates:
    """Calls the tool `add` for what the prompt asks, whatever the first turn says."""

    async def run(self, session: Session) -> None:
        await session.say(2)
        left, right = session.messages[0]["content"].rstrip("=").split("+")
        call = ToolCall("add", {"left": int(left), "right": int(right)})
        session.give(await call_tools(session, [call]))
        turn = await session.say()
        session.reward(float(turn.text == session.ground_truth))


def add(left: int, right: int) -> str:
    """Add two numbers.

    Args:
        left: One number.
        right: The other one.
    """
    return str(left + right)


AGENTS.update(
    one_turn=OneTurn,
    two_turns=TwoTurns,
    late=Late,
    noisy=Noisy,
    failing=Failing,
    calculates=Calculates,
)  # a worker that tests share may have them
