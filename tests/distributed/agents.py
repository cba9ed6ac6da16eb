"""Agents of tests, as a plugin: on sums such as `12+34=`, whose answer a calculator gives."""

import asyncio

from mindspeed_rlxf.agents.session import AGENTS, Session, register_agent


def _register(name: str):  # type: ignore[no-untyped-def]
    AGENTS.pop(name, None)  # a warm worker may have it from an earlier run
    return register_agent(name)


@_register("one_turn")
class OneTurn:
    """Says one turn, as a run without agent does."""

    async def run(self, session: Session) -> None:
        turn = await session.say()
        session.reward(float(turn.text == session.ground_truth))


@_register("two_turns")
class TwoTurns:
    """Gives two characters of the truth behind a short first turn; each turn has its reward."""

    async def run(self, session: Session) -> None:
        first = await session.say(3)
        session.reward(0.25 * first.text.count(session.ground_truth[0]), first=1.0)
        session.give([{"role": "tool", "content": "=" + session.ground_truth}])
        turn = await session.say()
        session.reward(float(session.ground_truth in turn.text))


@_register("late")
class Late(TwoTurns):
    """The same, with delays."""

    async def run(self, session: Session) -> None:
        await asyncio.sleep(0.02 * (session.sample_id % 3))
        await super().run(session)
        await asyncio.sleep(0.02 * (session.sample_id % 5))
