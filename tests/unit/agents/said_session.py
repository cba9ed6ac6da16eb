"""A session whose turns a test gives."""

from typing import Any

from mindspeed_rlxf.agents.session import SessionEnded, Turn
from mindspeed_rlxf.agents.tool_calls import parse_tool_calls
from mindspeed_rlxf.rollout.rollout_engine import FinishReason


class SaidSession:
    """Says the given texts, one a turn, and keeps what the agent gives and rewards."""

    ground_truth = "4"
    sample_id = 7

    def __init__(self, *texts: str, extra_info: dict[str, Any] | None = None) -> None:
        self.texts, self.extra_info = list(texts), extra_info or {}
        self.prompt: list[int] = []
        self.messages: list[dict[str, Any]] = []
        self.score = 0.0
        self.num_restarts = 0

    async def say(self, max_tokens: int | None = None) -> Turn:
        if not self.texts:
            raise SessionEnded("no turn is left")
        text = self.texts.pop(0)
        return Turn([1], text, FinishReason.STOP, parse_tool_calls(text))

    def give(self, messages: list[dict[str, Any]]) -> None:
        self.messages += messages

    def restart_clock(self) -> None:
        self.num_restarts += 1

    def reward(self, score: float, **parts: float) -> None:
        self.score += score
