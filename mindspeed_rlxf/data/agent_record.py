"""What an agent leaves of a conversation: its turns, its rewards, and why it failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

COLUMN = "agent_record"
"""Column of `extra_infos` with the record, as JSON types, of samples that an agent led."""


@dataclass(frozen=True)
class AgentFailure:
    """Why a conversation failed; its sample is not trained.

    Attributes:
        cause: exception, timeout, tool, no_turn, program, or rewrite.
        message: One line.
        details: The traceback, if there is one.
    """

    cause: str
    message: str
    details: str = ""


@dataclass(frozen=True)
class AgentRecord:
    """A conversation, beside its tokens.

    Example: two turns, of the response's tokens 0 to 3 and 9 to 12, with a tool's output between:

        AgentRecord("tools", [(0, 4), (9, 13)], [0.0, 1.0], {"format": 1.0}, num_tool_calls=1)

    Attributes:
        agent: Name of the agent.
        turns: (first token, end) of each turn in the response.
        rewards: Of each turn.
        parts: Named parts of the rewards, summed over the conversation.
        num_tool_calls: Over all turns, malformed ones included.
        failure: None = the agent returned.
    """

    agent: str
    turns: list[tuple[int, int]]
    rewards: list[float]
    parts: dict[str, float] = field(default_factory=dict)
    num_tool_calls: int = 0
    failure: AgentFailure | None = None

    @property
    def score(self) -> float:
        """Sum of the turns' rewards."""
        return sum(self.rewards)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> AgentRecord:
        """Return the record that `asdict` made, perhaps through JSON."""
        turns = [(int(first), int(end)) for first, end in stored["turns"]]
        failure = AgentFailure(**stored["failure"]) if stored["failure"] else None
        return cls(**{**stored, "turns": turns, "failure": failure})

    def add_to(self, extra_info: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row's columns with this record."""
        return {**extra_info, COLUMN: asdict(self)}


def find_record(extra_info: Mapping[str, Any]) -> AgentRecord | None:
    """Return the record in a row's columns; None if no agent led the sample."""
    stored = extra_info.get(COLUMN)
    return None if stored is None else AgentRecord.from_json(stored)
