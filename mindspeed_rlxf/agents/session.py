"""What an agent sees: a session with the policy, and the registry of agents.

@register_agent("guess")
class GuessAgent:
    async def run(self, session: Session) -> None:
        turn = await session.say()
        is_right = turn.text.strip() == session.ground_truth
        if not is_right:
            session.give([{"role": "user", "content": "No. Try again."}])
            turn = await session.say()
        session.reward(float(turn.text.strip() == session.ground_truth))
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from mindspeed_rlxf.config.registry import add_to
from mindspeed_rlxf.rollout.rollout_engine import FinishReason

Message: TypeAlias = dict[str, Any]
"""A message of a chat, as templates take it: "role", "content", and perhaps "tool_calls"."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool in a turn.

    Attributes:
        name: The tool; "" if the call is malformed.
        arguments: By parameter name.
        problem: Why the call is malformed, for the model; "" = it is well-formed.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True)
class Turn:
    """What the policy said.

    Attributes:
        token_ids: The sampled tokens, EOS included.
        text: Their text, without EOS and padding; other special tokens stay.
        finish_reason: STOP = an EOS or a stop string ends the tokens.
        tool_calls: Calls in the text, in order; [] without tools.
    """

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    tool_calls: list[ToolCall] = field(default_factory=list)


class SessionEnded(Exception):
    """Raised by `say` when no turn is left: the token budget or `rollout.max_turns` is spent.

    An agent need not catch it. What it rewards before counts.
    """


class ToolFailed(Exception):
    """Raised where a tool's process ended or did not start; the sample is then not trained."""


class ConversationFailed(Exception):
    """Raised where a conversation cannot be trained.

    Attributes:
        cause: Under which it is counted.
        details: A traceback or output, if there is one.
    """

    def __init__(self, cause: str, message: str, details: str = "") -> None:
        """Set the cause, what is wrong in one line, and details."""
        super().__init__(message)
        self.cause, self.details = cause, details


class Session(Protocol):
    """One sample's conversation.

    Attributes:
        prompt: Token ids of the prompt.
        messages: The chat so far: the prompt's, then each turn and each message of `give`.
        extra_info: The row's other columns.
        ground_truth: The row's answer.
        sample_id: Identifies the sample within the run.
    """

    prompt: list[int]
    messages: list[Message]
    extra_info: dict[str, Any]
    ground_truth: str
    sample_id: int

    async def say(self, max_tokens: int | None = None) -> Turn:
        """Have the policy sample a turn, at most `max_tokens`; None = what the budget leaves.

        Raises SessionEnded.
        """

    def give(self, messages: list[Message]) -> None:
        """Append messages, which the policy reads before its next turn. They are not trained.

        Before the first turn of a chat this takes an agent registered with `gives_first=True`.
        """

    def take_back(self) -> None:
        """Drop the newest turn, its reward, and what was given before it.

        The next `say` then samples with other random numbers. A dropped turn counts as one of
        `rollout.max_turns`. Raises SessionEnded.
        """

    def restart_clock(self) -> None:
        """Give the agent `rollout.turn_timeout_s` anew, as while it waits in a queue."""

    def reward(self, score: float, **parts: float) -> None:
        """Add to the sample's score, at the last token of the newest turn; `parts` are logged."""


class Agent(Protocol):
    """What leads a conversation. One object leads all samples of a process, at the same time."""

    async def run(self, session: Session) -> None:
        """Lead one conversation. Waiting for anything but the session must be asynchronous."""


AgentFactory: TypeAlias = Callable[[], Agent]

AGENTS: dict[str, AgentFactory] = {}
"""Agents by the name that `rollout.agent` or the column `agent_name` gives."""


GIVES_FIRST: set[str] = set()
"""Names of agents that may give something before the first turn."""


def register_agent(name: str, gives_first: bool = False) -> Callable[[AgentFactory], AgentFactory]:
    """Return a decorator that registers an agent's class, or a function that makes the agent.

    Args:
        name: For `rollout.agent` and the column `agent_name`.
        gives_first: Chats end without the header of an answer, as the agent's `give` goes on with
            them before its first `say`.

    Raises:
        ValueError: The name is taken.
    """
    register = add_to(AGENTS, name, "agent")

    def keep(factory: AgentFactory) -> AgentFactory:
        if gives_first:
            GIVES_FIRST.add(name)
        return register(factory)

    return keep
