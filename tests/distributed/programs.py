"""Programs of tests that lead conversations; each process of one imports this file alone."""

import os
from typing import Any

from tests.unit.agents.served import Client


def two_turns(row: dict[str, Any]) -> None:
    """As the agent `TwoTurns`."""
    client = Client(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
    messages, ground_truth = row["messages"], row["ground_truth"]
    first = client.say(messages, max_tokens=3)
    num_ones = float(first["content"].count("1"))
    client.post("/reward", score=0.25 * num_ones, ones=num_ones)
    messages += [first, {"role": "tool", "content": "=" + ground_truth, "tool_call_id": "1"}]
    last = client.say(messages)
    client.post("/reward", score=float(ground_truth in last["content"]))
