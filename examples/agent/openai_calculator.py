"""The calculator of `calculator.py` as a program that knows OpenAI's client alone.

    rollout.program: examples/agent/openai_calculator.py:solve        # within the run's processes
    rollout.program: python examples/agent/openai_calculator.py       # or with any interpreter

The client takes address and key from OPENAI_BASE_URL and OPENAI_API_KEY.
"""

import json
import re
import sys
from typing import Any

CALL = re.compile(r"(\d+)\+(\d+)\?")


def solve(row: dict[str, Any]) -> None:
    """Ask for an answer; if it is a call, give its result and ask once more."""
    from openai import OpenAI

    client = OpenAI(timeout=600.0)
    messages = row["messages"]
    reply = client.chat.completions.create(model="policy", messages=messages)
    answer = reply.choices[0].message
    call = CALL.fullmatch(answer.content or "")
    if call is not None:
        result = {
            "role": "tool",
            "tool_call_id": "calculator",
            "content": f"{int(call[1]) + int(call[2])}>",
        }
        messages = [*messages, answer.model_dump(exclude_none=True), result]
        client.chat.completions.create(model="policy", messages=messages)


if __name__ == "__main__":
    solve(json.load(sys.stdin))
