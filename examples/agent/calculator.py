"""A calculator for the tiny task: a turn such as `12+34?` is a call, and `46>` its result.

`shuffled_calculator` answers with the sum of other numbers: a control, as such calls are useless.
"""

import re

from mindspeed_rlxf.agents.session import Session, register_agent

CALL = re.compile(r"(\d+)\+(\d+)\?")


@register_agent("calculator")
class Calculator:
    async def run(self, session: Session) -> None:
        turn = await session.say()
        call = CALL.fullmatch(turn.text)
        if call is not None:
            result = self.add(int(call[1]), int(call[2]))
            session.give([{"role": "tool", "content": f"{result}>"}])
            await session.say()

    def add(self, left: int, right: int) -> int:
        return left + right


@register_agent("shuffled_calculator")
class ShuffledCalculator(Calculator):
    def add(self, left: int, right: int) -> int:
        return 20 + (37 * left + 59 * right) % 179
