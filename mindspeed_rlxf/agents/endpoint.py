"""The OpenAI endpoint of one session: which requests are its next turn, and which are not.

    request                                          here
    extends the chat                                 the next turn
    the pending one again (a client retries)         joins it
    another, while one is pending                    409
    the last one again, after its answer was sent    takes that turn back, and samples another
    anything else                                    409, and the sample is not trained

An answer is part of the chat once it was sent to a client that was there, or a request has it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

from mindspeed_rlxf.agents.chat_api import (
    ChatError,
    ChatRequest,
    Completion,
    Identity,
    answer_message,
    identity_of,
    read_messages,
)
from mindspeed_rlxf.agents.session import ConversationFailed, Message, Session, SessionEnded, Turn


class ServedSession(Session, Protocol):
    """A session that an endpoint can serve."""

    @property
    def shown_messages(self) -> list[Message]:
        """The chat so far; a prompt that is text is a user's message."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, and of the row behind it."""


@dataclass
class Exchange:
    """A request and its answer.

    Attributes:
        chat: The request's messages.
        turn: Samples the answer.
        completion: The answer, once it was sampled.
    """

    chat: list[Identity]
    turn: asyncio.Task[Turn]
    completion: Completion | None = None
    _num_sent: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note_sent(self, num: int) -> None:
        """Note that an answer is sent (1), or that it was not received after all (-1)."""
        with self._lock:
            self._num_sent += num

    @property
    def was_sent(self) -> bool:
        """Whether a client has got the answer, as far as we know."""
        return self._num_sent > 0


class Endpoint:
    """Serves a session; all but `note_sent` runs on the agents' event loop.

    An asynchronous context manager: when the block ends, so does the endpoint, and what makes the
    conversation fail is raised.

    Attributes:
        messages: The chat before the first turn, as the first request has to repeat it.
        base_url: For OpenAI's clients, and their variable OPENAI_BASE_URL.
        api_key: Theirs too; a secret.
        loop: Runs the session's agent.
    """

    def __init__(
        self,
        session: ServedSession,
        base_url: str,
        api_key: str,
        stop_strings: tuple[str, ...] = (),
        tools: tuple[str, ...] = (),
    ) -> None:
        """Serve a session, on its event loop.

        Requests may have the stop strings and tools (names) of the run.
        """
        self.base_url, self.api_key = base_url, api_key
        self.loop = asyncio.get_running_loop()
        self._session, self._stop_strings, self._tools = session, stop_strings, tools
        self.messages = session.shown_messages
        self._chat = [identity_of(message) for message in read_messages(self.messages)]
        self._last: Exchange | None = None  # its answer is no part of `_chat` yet
        self._num_turns = 0
        self._num_calls = 0
        self._failure: Exception | None = None
        self._has_ended = False  # whether a turn was refused as the budget is spent
        self._is_closed = False
        self.on_close: Callable[[], Any] = lambda: None

    async def complete(self, request: ChatRequest) -> Exchange:
        """Answer a request; the exchange has a completion.

        Raises:
            ChatError: The request is refused.
        """
        exchange = self._find_exchange(request)
        try:
            await asyncio.shield(exchange.turn)
        except SessionEnded as end:
            self._has_ended = True
            raise ChatError(400, "context_length_exceeded", str(end)) from None
        except asyncio.CancelledError:
            raise ChatError(409, "conversation_ended", "the conversation has ended") from None
        except Exception as error:  # of a template or a tokenizer; as if an agent had raised it
            self._failure = error
            raise ChatError(400, "invalid_request_error", f"{error}") from None
        return exchange

    def reward(self, score: float, parts: dict[str, float]) -> None:
        """See `Session.reward`."""
        self._session.reward(score, **parts)

    def _find_exchange(self, request: ChatRequest) -> Exchange:
        """Return the exchange that a request begins or joins. Raises ChatError."""
        if self._is_closed:
            raise ChatError(401, "invalid_api_key", "there is no conversation of this token")
        if self._failure is not None:
            raise ChatError(409, "conversation_ended", "this conversation has failed")
        request.check(self._stop_strings, self._tools)
        chat, last = request.identities, self._last
        if last is None:
            return self._extend(self._chat, chat, request)
        is_same = chat == last.chat
        if not last.turn.done():
            if is_same:
                return last
            raise ChatError(409, "pending", "another request of this conversation is pending")
        if last.completion is None:  # the turn was refused
            return last
        if is_same and not last.was_sent:
            return last
        answered = [*last.chat, identity_of(last.completion.message)]
        is_uncommitted = not last.was_sent and not _extends(chat, answered)
        if is_same or (is_uncommitted and _extends(chat, self._chat)):
            self._take_back()
            return self._extend(self._chat, chat, request)
        return self._extend(answered, chat, request)

    def _take_back(self) -> None:
        try:
            self._session.take_back()
        except SessionEnded as end:
            self._has_ended = True
            raise ChatError(400, "context_length_exceeded", str(end)) from None

    def _extend(
        self, before: list[Identity], chat: list[Identity], request: ChatRequest
    ) -> Exchange:
        """Ask the policy for the next turn of the chat `before`."""
        if not _extends(chat, before):
            index = 0
            while index < min(len(chat), len(before)) and chat[index] == before[index]:
                index += 1
            message = (
                f"the messages must begin with those of the conversation, which has {len(before)}; "
                f"message {index} is another one"
            )
            self._failure = ConversationFailed("rewrite", message)
            raise ChatError(409, "rewritten", message)
        self._chat = before
        self._session.give(request.messages[len(before) :])
        exchange = Exchange(chat, self.loop.create_task(self._say(request.max_tokens)))
        self._last = exchange
        return exchange

    async def _say(self, max_tokens: int | None) -> Turn:
        turn = await self._session.say(max_tokens)
        assert self._last is not None
        message = answer_message(turn, self._num_calls)
        self._num_calls += len(message.get("tool_calls", ()))
        identifier = f"chatcmpl-{self._session.sample_id}-{self._num_turns}"
        self._num_turns += 1
        num_before = self._session.num_tokens - len(turn.token_ids)
        self._last.completion = Completion.of(turn, message, identifier, num_before)
        return turn

    async def __aenter__(self) -> Endpoint:
        """Return the endpoint."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        """Close the endpoint; raise why the conversation failed.

        An error of a client whose turn was refused, as the budget is spent, is no failure.
        """
        self._is_closed = True
        self.on_close()
        if self._last is not None and not self._last.turn.done():
            self._last.turn.cancel()
        if error is not None and not isinstance(error, Exception):
            return
        if self._failure is not None:
            raise self._failure from None
        if error is not None and self._has_ended:
            raise SessionEnded(str(error)) from None


def _extends(chat: list[Identity], before: list[Identity]) -> bool:
    return chat[: len(before)] == before
