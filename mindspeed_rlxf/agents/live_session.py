"""The session of a running conversation: its row of tokens, and what the agent has said so far."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from mindspeed_rlxf.agents.dialect import Dialect
from mindspeed_rlxf.agents.session import Message, SessionEnded, Turn
from mindspeed_rlxf.data.agent_record import AgentFailure, AgentRecord
from mindspeed_rlxf.rollout.rollout_engine import Begun, FinishReason, GenerationResult


class Move(Enum):
    """Whose move it is."""

    AGENT = "agent"  # the agent runs, or waits for something of its own
    POLICY = "policy"  # the agent has asked for a turn
    NONE = "none"  # the agent has returned, or its sample has failed


@dataclass(frozen=True)
class Ask:
    """The next turn of a conversation.

    Attributes:
        begun: The row's response so far, with the observation before the turn; None = nothing.
        limit: Most tokens of the response after the turn.
        attempt: Turns that the conversation has taken back; each changes the random numbers.
    """

    begun: Begun | None
    limit: int
    attempt: int = 0


@dataclass(frozen=True)
class RowLimits:
    """Budgets of a conversation.

    Attributes:
        tokens: Most tokens of the response, observations included.
        turns: Most turns.
        eos_token_ids: End a turn.
    """

    tokens: int
    turns: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class TurnStart:
    """What a conversation has before a turn, and before what was given for it."""

    num_tokens: int
    num_messages: int
    reason: FinishReason
    parts: dict[str, float]  # of the reward


class LiveSession:
    """One sample's conversation (`Session`), led by an agent on the event loop.

    Only the event loop's thread changes it, except for `move`, which a lock of `AgentLoop` guards.

    Attributes:
        move: Whose move it is.
        moved_at: When the agent got its move, seconds of `time.monotonic`.
        ask: The turn that the agent has asked for last.
        failure: Why the conversation failed.
        task: Leads the conversation.
    """

    def __init__(
        self,
        sample_id: int,
        agent_name: str,
        prompt: list[int],
        messages: Sequence[Message],
        extra_info: dict[str, Any],
        ground_truth: str,
        limits: RowLimits,
        dialect: Dialect,
        on_ask: Any,
        gives_first: bool = False,
    ) -> None:
        """Begin a conversation.

        `on_ask` is called on the loop when the agent asks for a turn. With `gives_first` a chat's
        prompt has no header of the first turn.
        """
        self.sample_id, self.agent_name, self.prompt = sample_id, agent_name, prompt
        self.messages: list[Message] = [dict(message) for message in messages]
        self.extra_info, self.ground_truth = extra_info, ground_truth
        self.limits, self.dialect = limits, dialect
        self.move, self.moved_at = Move.AGENT, 0.0
        self.ask = Ask(None, limits.tokens)
        self.failure: AgentFailure | None = None
        self.task: asyncio.Task[None] | None = None
        self.has_returned = False
        self._on_ask = on_ask
        self._gives_first = gives_first
        self._turn: asyncio.Future[Turn] | None = None  # that the agent waits for
        self._given: list[Message] = []  # since the last turn
        # The response, observations included.
        self._tokens: list[int] = []
        self._log_probs: list[float] = []
        self._versions: list[int] = []  # of observations 0, until `finish`
        self._trained: list[bool] = []
        self._turns: list[tuple[int, int]] = []
        self._starts: list[TurnStart] = []  # of the turns, and of one that is sampled
        self._num_heard_messages = len(self.messages)  # up to the newest turn
        self._num_taken_back = 0
        self._rewards: list[float] = []
        self._early_reward = 0.0  # given before the first turn
        self._parts: dict[str, float] = {}
        self._num_tool_calls: list[int] = []  # of each turn
        self._reason = FinishReason.LENGTH
        self._ran_out = False  # whether a turn was refused

    # What the agent calls.

    async def say(self, max_tokens: int | None = None) -> Turn:
        """See `Session.say`."""
        if self._turn is not None:
            raise RuntimeError("a session samples one turn at a time; await the first one")
        self._append_given(max_tokens)
        self._turn = asyncio.get_running_loop().create_future()
        self._on_ask(self)
        return await self._turn

    def give(self, messages: list[Message]) -> None:
        """See `Session.give`."""
        self._given += messages
        self.messages += messages

    def take_back(self) -> None:
        """See `Session.take_back`."""
        if self._turn is not None:
            raise RuntimeError("a turn that is sampled cannot be taken back; await it first")
        self._check_turns()
        start = self._starts.pop()
        for values in (self._tokens, self._log_probs, self._versions, self._trained):
            del values[start.num_tokens :]
        for of_turn in (self._turns, self._rewards, self._num_tool_calls):
            del of_turn[-1]
        del self.messages[start.num_messages :]
        self._num_heard_messages = start.num_messages
        self._given = []
        self._reason = start.reason
        self._parts = start.parts
        self._num_taken_back += 1

    @property
    def shown_messages(self) -> list[Message]:
        """The chat so far, as a program gets it: a prompt that is text is a user's message."""
        if self.dialect.is_chat:
            return list(self.messages)
        return [{"role": "user", "content": self.dialect.prompt_text(self.prompt)}, *self.messages]

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, and of the row behind it."""
        return len(self.prompt) + len(self._tokens)

    def restart_clock(self) -> None:
        """See `Session.restart_clock`."""
        self.moved_at = time.monotonic()

    def reward(self, score: float, **parts: float) -> None:
        """See `Session.reward`."""
        for name, value in {"the reward": score, **parts}.items():
            if not math.isfinite(value):
                raise ValueError(f"{name} must be a finite number, not {value}")
        if self._rewards:
            self._rewards[-1] += float(score)
        else:
            self._early_reward += float(score)
        for name, value in parts.items():
            self._parts[name] = self._parts.get(name, 0.0) + float(value)

    def _check_turns(self) -> None:
        """Raise SessionEnded if no turn is left."""
        if len(self._turns) + self._num_taken_back >= self.limits.turns:
            self._ran_out = True
            raise SessionEnded(f"all {self.limits.turns} turns are spent (rollout.max_turns)")

    def _append_given(self, max_tokens: int | None) -> None:
        """Append the given messages to the row, and set `ask`. Raises SessionEnded."""
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens must be 1 or more, not {max_tokens}")
        self._check_turns()
        if self._turns:
            last_id = self._tokens[-1]
            eos_id = last_id if last_id in self.limits.eos_token_ids else None
            observation = self.dialect.observation_ids(self._given, eos_id)
        else:
            observation = self.dialect.opening_ids(self._given, self._gives_first)
        start = len(self._tokens) + len(observation)
        if start >= self.limits.tokens:
            self._ran_out = True
            raise SessionEnded(
                f"no token is left for a turn: {start} of actor_rollout.max_new_tokens="
                f"{self.limits.tokens} are spent"
            )
        self._starts.append(
            TurnStart(len(self._tokens), self._num_heard_messages, self._reason, dict(self._parts))
        )
        self._given = []
        self._tokens += observation
        self._log_probs += [0.0] * len(observation)
        self._versions += [0] * len(observation)
        self._trained += [False] * len(observation)
        begun = None
        if self._tokens:
            begun = Begun(list(self._tokens), list(self._log_probs), list(self._versions))
        limit = self.limits.tokens
        if max_tokens is not None:
            limit = min(limit, start + max_tokens)
        self.ask = Ask(begun, limit, self._num_taken_back)

    # What the loop calls.

    def hear(self, result: GenerationResult) -> None:
        """Give the agent the turn that it has asked for; `result` has the whole response."""
        start, end = len(self._tokens), len(result.tokens)
        self._tokens, self._log_probs = list(result.tokens), list(result.log_probs)
        self._versions = list(result.token_versions)
        self._trained += [True] * (end - start)
        self._reason = result.finish_reason
        self._turns.append((start, end))
        self._num_tool_calls.append(0)
        self._rewards.append(self._early_reward)
        self._early_reward = 0.0
        waiting, self._turn = self._turn, None
        is_awaited = waiting is not None and not waiting.done()
        try:
            turn = self._read_turn(self._tokens[start:], result.finish_reason)
        except Exception as error:  # of a tokenizer or a parser
            if waiting is not None and is_awaited:
                waiting.set_exception(error)
            return
        if waiting is not None and is_awaited:
            waiting.set_result(turn)

    def _read_turn(self, token_ids: list[int], reason: FinishReason) -> Turn:
        text = self.dialect.turn_text(token_ids, reason is FinishReason.STOP)
        calls = self.dialect.tool_calls(text)
        self._num_tool_calls[-1] = len(calls)
        self.messages.append({"role": "assistant", "content": text})
        self._num_heard_messages = len(self.messages)
        return Turn(token_ids, text, reason, calls)

    def finish(self, place: int, version: int) -> tuple[GenerationResult, AgentRecord]:
        """Return the row and the record of a conversation that has ended.

        A failed one has no trained token, and one EOS of `version` if it has no turn. Observations
        behind the last turn are not in the row. The version of an observation is that of the next
        turn. LENGTH = a budget ended the conversation, not the agent.
        """
        failure = self.failure
        if not self._turns and failure is None:
            message = f"the agent {self.agent_name!r} returned before its first turn"
            failure = AgentFailure("no_turn", message)
        turns = list(self._turns)
        end = turns[-1][1] if turns else 0
        # Copies, as an agent that was given up may still append to the row.
        tokens, log_probs = self._tokens[:end], self._log_probs[:end]
        versions, trained = self._versions[:end], self._trained[:end]
        if not turns:
            tokens, log_probs = [self.limits.eos_token_ids[0]], [0.0]
            versions, trained = [version], [False]
        for token in reversed(range(len(tokens) - 1)):
            if not trained[token]:
                versions[token] = versions[token + 1]
        if failure is not None:
            trained = [False] * len(tokens)
        is_full = self._reason is FinishReason.LENGTH and end >= self.limits.tokens
        is_cut = self._ran_out or is_full or failure is not None
        reason = FinishReason.LENGTH if is_cut else FinishReason.STOP
        result = GenerationResult(
            place,
            tokens,
            log_probs,
            reason,
            versions[-1],
            versions,
            None if all(trained) else trained,
        )
        record = AgentRecord(
            self.agent_name,
            turns,
            self._rewards[: len(turns)],
            dict(self._parts),
            sum(self._num_tool_calls[: len(turns)]),
            failure,
        )
        return result, record
