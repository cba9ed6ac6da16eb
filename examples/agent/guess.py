"""An agent that answers guesses of a number."""

from mindspeed_rlxf.agents.session import Session, register_agent


@register_agent("guess")
class Guess:
    async def run(self, session: Session) -> None:
        target = int(session.ground_truth)
        for attempt in range(4):
            turn = await session.say()
            guess = turn.text.strip()
            if guess == str(target):
                session.reward(1.0 - 0.1 * attempt, attempts=attempt + 1)
                return
            hint = "larger" if guess.isdigit() and int(guess) < target else "smaller"
            session.give([{"role": "user", "content": f"It is {hint}."}])
