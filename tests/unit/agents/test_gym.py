"""Episodes with environments that have Gymnasium's `reset` and `step`, or OpenEnv's."""

import asyncio
import threading
import time
from dataclasses import dataclass
from typing import Any

import pytest

from mindspeed_rlxf.agents.gym import GymAgent
from tests.unit.agents.said_session import SaidSession


class Guess:
    """A text environment as Gymnasium has them: guess the number."""

    def __init__(self, target: str, limit: int = 9) -> None:
        self.target, self.limit = target, limit
        self.seed: int | None = None
        self.is_closed = False

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.seed = seed
        return "Guess.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        assert threading.current_thread().daemon, "a step may take its time"
        self.limit -= 1
        is_right = action == self.target
        return "No.", 1.0 if is_right else -0.25, is_right, self.limit == 0, {}

    def close(self) -> None:
        self.is_closed = True


@dataclass
class StepResult:
    observation: str
    reward: float | None = None
    done: bool = False


class Client:
    """An asynchronous client as OpenEnv has them."""

    def __init__(self, target: str) -> None:
        self.target = target

    async def reset(self, **keywords: Any) -> StepResult:
        self.keywords = keywords
        return StepResult("Guess.")

    async def step(self, action: str) -> StepResult:
        await asyncio.sleep(0)
        return StepResult("No.", float(action == self.target), action == self.target)


def play(agent: GymAgent, *texts: str) -> SaidSession:
    session = SaidSession(*texts)
    asyncio.run(agent.run(session))
    return session


def test_an_episode_goes_on_until_its_environment_ends_it() -> None:
    made: list[Guess] = []

    def factory(session: Any) -> Guess:
        made.append(Guess(session.ground_truth))
        return made[-1]

    session = play(GymAgent(factory), "3", "5", "4", "not said")
    assert [message["content"] for message in session.messages] == ["Guess.", "No.", "No."]
    assert session.score == 1.0 - 2 * 0.25 and session.texts == ["not said"]
    assert made[0].is_closed
    assert play(GymAgent(lambda _: Guess("4", 2)), "1", "2", "3").texts == ["3"]
    assert play(GymAgent(lambda _: Guess("4"), max_turns=1), "1", "2").score == -0.25


def test_the_samples_of_a_row_play_with_one_seed() -> None:
    seeds = []
    for prompt, sample_id, extra_info in (
        ([1], 1, {}),
        ([1], 2, {}),
        ([2], 3, {}),
        ([2], 4, {"seed": 5}),
    ):
        environment = Guess("4")
        session = SaidSession("4", extra_info=extra_info)
        session.prompt, session.sample_id = prompt, sample_id
        asyncio.run(GymAgent(lambda _, environment=environment: environment).run(session))
        seeds.append(environment.seed)
    first, same, other, given = seeds
    assert first == same != other and given == 5


def test_a_client_of_openenv_is_an_environment_too() -> None:
    client = Client("4")
    session = play(GymAgent(lambda _: client), "3", "4", "not said")
    assert session.score == 1.0 and session.texts == ["not said"]
    assert list(client.keywords) == ["seed"]


def test_a_step_of_another_form_is_an_error() -> None:
    class Done(Guess):
        def step(self, action: str) -> Any:
            return True, {}

    with pytest.raises(ValueError, match="step must return"):
        play(GymAgent(lambda _: Done("4")), "3", "4")


def test_an_observation_may_be_a_tuple() -> None:
    class Older(Guess):
        def reset(self, *, seed: int | None = None) -> Any:
            return (8, 6, 0)

        def step(self, action: str) -> Any:
            return (8, 6, 1), 1.0, True, {}

    session = play(GymAgent(lambda _: Older("4")), "3", "4")
    assert [message["content"] for message in session.messages] == ["(8, 6, 0)"]
    assert session.score == 1.0 and session.texts == ["4"]


def test_an_exception_of_an_environment_is_the_agents() -> None:
    class Broken(Guess):
        def step(self, action: str) -> Any:
            raise ConnectionError("no server")

    environment = Broken("4")
    with pytest.raises(ConnectionError):
        play(GymAgent(lambda _: environment), "3")
    assert environment.is_closed


@pytest.mark.parametrize("raised", [StopIteration("over"), SystemExit(3)])
def test_what_no_future_can_raise_is_an_error(raised: BaseException) -> None:
    class Broken(Guess):
        def step(self, action: str) -> Any:
            raise raised

    async def play_in_time() -> None:
        await asyncio.wait_for(GymAgent(lambda _: Broken("4")).run(SaidSession("3")), 30)

    with pytest.raises(RuntimeError, match=type(raised).__name__):
        asyncio.run(play_in_time())


def test_environments_wait_beside_each_other() -> None:
    class Slow(Guess):
        def step(self, action: str) -> Any:
            time.sleep(0.5)
            return super().step(action)

    agent = GymAgent(lambda _: Slow("4"))

    async def play_many() -> None:
        await asyncio.gather(*(agent.run(SaidSession("4")) for _ in range(40)))

    began = time.monotonic()
    asyncio.run(play_many())
    assert time.monotonic() - began < 5, "40 steps of 0.5 s"
