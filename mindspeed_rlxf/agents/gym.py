"""Environments with `reset` and `step` as agents: Gymnasium's text environments, OpenEnv's clients.

register_agent("wordle")(lambda: GymAgent(lambda session: Wordle(session.ground_truth)))
"""

import asyncio
import inspect
import threading
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

from mindspeed_rlxf.agents.session import Session, Turn

T = TypeVar("T")


class GymAgent:
    """Plays one episode with an environment: turns are actions, observations a user's messages.

    Calls of the environment run in threads of their own, as they may wait. `reset` gets a `seed` if
    it takes one, the same for all samples of a row. Subclasses may change how texts become actions
    and observations texts.
    """

    def __init__(self, factory: Callable[[Session], Any], max_turns: int | None = None) -> None:
        """Set what makes an environment for a session.

        Args:
            factory: Its result has `reset` and `step`, perhaps `close`, asynchronous or not.
            max_turns: Most turns of an episode; None = until the environment, or
                `rollout.max_turns`, ends it.
        """
        self._factory = factory
        self._max_turns = max_turns

    def action(self, turn: Turn) -> Any:
        """Return the action that a turn stands for; here its text."""
        return turn.text

    def text(self, observation: Any) -> str:
        """Return an observation as text; "" if there is none."""
        return "" if observation is None else str(observation)

    async def run(self, session: Session) -> None:
        """Lead one conversation."""
        environment = await in_thread(self._factory, session)
        try:
            seed = {"seed": seed_of(session)} if _takes_seed(environment.reset) else {}
            observation, ended = _read_reset(await in_thread(environment.reset, **seed))
            num_turns = 0
            while not ended and num_turns != self._max_turns:
                if text := self.text(observation):
                    session.give([{"role": "user", "content": text}])
                turn = await session.say()
                num_turns += 1
                result = await in_thread(environment.step, self.action(turn))
                observation, reward, ended = _read_step(result)
                if reward:
                    session.reward(reward)
        finally:
            close = getattr(environment, "close", None)
            if close is not None:
                await in_thread(close)


def seed_of(session: Session) -> int:
    """Return the row's column `seed`, else a number that follows from its prompt and answer."""
    seed = session.extra_info.get("seed")
    if isinstance(seed, int):
        return seed
    return zlib.crc32(f"{session.prompt}{session.ground_truth}".encode())


def _takes_seed(reset: Callable[..., Any]) -> bool:
    """Whether `reset` takes a seed, perhaps among keywords of any name, as OpenEnv's clients do."""
    parameters = inspect.signature(reset).parameters.values()
    return any(p.name == "seed" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def _read_reset(result: Any) -> tuple[Any, bool]:
    """Return (observation, whether the episode has ended).

    Gymnasium's is (observation, info); OpenEnv's has attributes.
    """
    if isinstance(result, tuple) and len(result) == 2:
        return result[0], False
    return getattr(result, "observation", result), bool(getattr(result, "done", False))


def _read_step(result: Any) -> tuple[Any, float, bool]:
    """Return (observation, reward, whether the episode has ended).

    Gymnasium's is (observation, reward, terminated, truncated, info), with one flag in older
    versions; OpenEnv's has attributes.

    Raises:
        ValueError: It is another one, as TextArena's (done, info).
    """
    if isinstance(result, tuple) and len(result) in (4, 5):
        observation, reward, *flags, _ = result
        return observation, float(reward), any(map(bool, flags))
    if not hasattr(result, "done"):
        raise ValueError(
            "step must return (observation, reward, terminated, truncated, info), or an object "
            f"with observation, reward and done; not {result!r:.200}"
        )
    observation = getattr(result, "observation", result)
    return observation, float(getattr(result, "reward", None) or 0.0), bool(result.done)


async def in_thread(function: Callable[..., T], *args: Any, **keywords: Any) -> T:
    """Call a function in a thread of its own, and wait for its result, also of a coroutine.

    The thread does not keep the process from ending.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():  # no longer waited for
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = function(*args, **keywords)
        except Exception as raised:
            error = raised
            if isinstance(raised, StopIteration):  # no future and no coroutine may raise it
                error = RuntimeError(f"StopIteration: {raised}")
        except BaseException as raised:  # exit() of a thread
            error = RuntimeError(f"{type(raised).__name__}: {raised}")
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, daemon=True).start()
    result = await future
    return await result if inspect.isawaitable(result) else result
