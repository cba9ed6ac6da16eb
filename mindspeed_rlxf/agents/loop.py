"""The event loop of a process's agents: a thread that runs one coroutine per conversation.

Decoding goes on beside it. What enters the engine, and when, depends on slices alone: `wait`
returns once each of the given conversations has asked for a turn or ended, however long that took.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterable
from typing import Any

from mindspeed_rlxf.agents.live_session import LiveSession, Move
from mindspeed_rlxf.agents.session import Agent, ConversationFailed, SessionEnded, ToolFailed
from mindspeed_rlxf.data.agent_record import AgentFailure
from mindspeed_rlxf.rollout.rollout_engine import GenerationResult

MAX_TRACEBACK = 4000  # characters, the last ones
MAX_MESSAGE = 300
BEAT_S = 0.5  # longest time between two heartbeats


class LoopBlocked(RuntimeError):
    """An agent occupies the event loop, so that no other agent can go on."""


class AgentLoop:
    """Leads conversations on an event loop in a thread of its own."""

    def __init__(self, turn_timeout_s: float) -> None:
        """Start the thread. An agent has `turn_timeout_s` between two turns."""
        self.turn_timeout_s = turn_timeout_s
        self._beat_s = min(BEAT_S, turn_timeout_s / 8)
        self._loop = asyncio.new_event_loop()
        self._moved = threading.Condition()  # guards each session's `move`
        self._beat_at = time.monotonic()
        self._thread = threading.Thread(target=self._loop.run_forever, name="agents", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)
        _begin_beats(weakref.ref(self), self._loop)

    def start(self, session: LiveSession, agent: Agent) -> None:
        """Start to lead a conversation."""
        session.moved_at = time.monotonic()
        self._loop.call_soon_threadsafe(self._start_task, session, agent)

    def _start_task(self, session: LiveSession, agent: Agent) -> None:
        name = f"agent {session.agent_name!r}, sample {session.sample_id}"
        session.task = self._loop.create_task(self._lead(session, agent), name=name)

    async def _lead(self, session: LiveSession, agent: Agent) -> None:
        """Run the agent to its end; note why it failed."""
        failure = None
        try:
            await agent.run(session)
        except SessionEnded:
            pass
        except asyncio.CancelledError:
            if session.move is Move.NONE:  # by `wait`, which has noted the failure
                raise
            failure = AgentFailure("exception", "the agent was cancelled by its own code")
        except ConversationFailed as error:
            failure = AgentFailure(error.cause, str(error)[:MAX_MESSAGE], error.details)
        except ToolFailed as error:
            failure = AgentFailure("tool", _shorten(error), _format(error))
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            failure = AgentFailure("exception", _shorten(error), _format(error))
        with self._moved:
            session.has_returned = True
            if session.move is Move.NONE:
                return
            session.failure = failure
            if session.move is Move.AGENT:  # else the turn that is sampled ends first
                session.move = Move.NONE
            self._moved.notify_all()

    def note_ask(self, session: LiveSession) -> None:
        """Note that an agent has asked for a turn (`LiveSession.on_ask`)."""
        with self._moved:
            if session.move is Move.AGENT:
                session.move = Move.POLICY
                self._moved.notify_all()

    def deliver(self, session: LiveSession, result: GenerationResult) -> None:
        """Give an agent its turn; it goes on at once, beside whatever this thread does."""
        with self._moved:
            session.moved_at = time.monotonic()
            session.move = Move.NONE if session.has_returned else Move.AGENT
        if session.has_returned:  # without waiting for this turn
            session.hear(result)
        else:
            self._loop.call_soon_threadsafe(session.hear, result)

    def wait(self, sessions: Iterable[LiveSession]) -> None:
        """Wait until it is no agent's move; one that takes longer than its time fails.

        Raises:
            LoopBlocked: An agent's code has run for `turn_timeout_s` without awaiting anything, or
                the thread has ended.
        """
        began = time.monotonic()
        for session in sessions:
            with self._moved:
                while session.move is Move.AGENT:
                    if not self._thread.is_alive():
                        raise LoopBlocked("the thread of the agents' event loop has ended")
                    now = time.monotonic()
                    silent_s = now - self._beat_at
                    if min(silent_s, now - began) > self.turn_timeout_s:
                        raise LoopBlocked(self._describe_block(silent_s))
                    is_late = now - session.moved_at > self.turn_timeout_s
                    # While another agent blocks the loop, this one cannot go on.
                    if is_late and silent_s < 4 * self._beat_s:
                        self._give_up(session)
                        break
                    self._moved.wait(self._beat_s)

    def _give_up(self, session: LiveSession) -> None:
        session.move = Move.NONE
        rule = f"no turn and no end within rollout.turn_timeout_s={self.turn_timeout_s:g}"
        stack = ""
        if session.task is not None:
            stack = _format_stack(session.task)
            self._loop.call_soon_threadsafe(session.task.cancel)
        session.failure = AgentFailure("timeout", rule, stack)

    def _describe_block(self, silent_s: float) -> str:
        task = asyncio.current_task(self._loop)
        name = task.get_name() if task is not None else "an agent"
        frame = sys._current_frames().get(self._thread.ident or 0)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        return (
            f"{name} has blocked the event loop of all agents for {silent_s:.1f} s, longer than "
            f"rollout.turn_timeout_s={self.turn_timeout_s:g}; await what takes long, or run it by "
            f"asyncio.to_thread:\n{stack[-MAX_TRACEBACK:]}"
        )


def _begin_beats(owner: weakref.ref[AgentLoop], loop: asyncio.AbstractEventLoop) -> None:
    def beat() -> None:
        agents = owner()
        if agents is not None:
            agents._beat_at = time.monotonic()
            loop.call_later(agents._beat_s, beat)

    loop.call_soon_threadsafe(beat)


def _format_stack(task: asyncio.Task[None]) -> str:
    """Return where a task waits, its agent's code first."""
    lines: list[str] = []
    awaited: Any = task.get_coro()
    while getattr(awaited, "cr_frame", None) is not None:
        lines += traceback.format_stack(awaited.cr_frame, limit=1)
        awaited = awaited.cr_await
    return "".join(lines[1:])[-MAX_TRACEBACK:]


def _shorten(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:MAX_MESSAGE]


def _format(error: BaseException) -> str:
    frames = error.__traceback__
    lines = traceback.format_exception(type(error), error, frames and frames.tb_next)
    return "".join(lines).rstrip()[-MAX_TRACEBACK:]
