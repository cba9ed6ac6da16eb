"""Programs of tests; they need nothing but the standard library."""

import os
import re
import signal
import subprocess
import time
from typing import Any

from tests.unit.agents.served import Client


def client() -> Client:
    return Client(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])


def talk(row: dict[str, Any]) -> dict[str, float]:
    """As `Talk` of the tests of conversations: 1 to 3 turns, with `12` behind each."""
    session, messages, num_tokens = client(), row["messages"], 0
    for _ in range(1 + row["sample_id"] % 3):
        _, answer = session.post(messages=messages, max_tokens=3)
        num_tokens += answer["usage"]["completion_tokens"]
        more = {"role": "user", "content": "12"}
        messages = [*messages, answer["choices"][0]["message"], more]
    return {"score": float(num_tokens), "parts": 1.0}


async def talk_late(row: dict[str, Any]) -> dict[str, float]:
    time.sleep(0.05 * (row["sample_id"] % 4))
    print("printed", os.environ["OPENAI_API_KEY"])
    return talk(row)


def misbehave(row: dict[str, Any]) -> float:
    """One turn, and then what the sample id says."""
    client().say(row["messages"])
    how = row["sample_id"] % 5
    if how == 0:
        raise OSError(f"no database for {os.environ['OPENAI_API_KEY']}")
    if how == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if how == 2:
        subprocess.run(["sh", "-c", "sleep 4243 &"], start_new_session=True, check=True)
        with subprocess.Popen(["sleep", "4243"], start_new_session=True):
            time.sleep(100)
    if how == 3:
        client().say([{"role": "user", "content": "another"}])
    return 1.0


def outlive(row: dict[str, Any]) -> None:
    """Start a process, and never ask for a turn."""
    with subprocess.Popen(["sleep", "4244"]):
        time.sleep(100)


def leave(row: dict[str, Any]) -> None:
    """Take a turn, and leave processes: a child, and an orphan in a session of its own."""
    client().say(row["messages"])
    subprocess.Popen(["sleep", "4247"])
    subprocess.run(["sh", "-c", "sleep 4247 &"], start_new_session=True, check=True)


def calculate(row: dict[str, Any]) -> None:
    """As the calculator of the examples."""
    session, messages = client(), row["messages"]
    answer = session.say(messages)
    call = re.fullmatch(r"(\d+)\+(\d+)\?", answer["content"])
    if call is not None:
        result = {"role": "tool", "content": f"{int(call[1]) + int(call[2])}>"}
        session.say([*messages, answer, result])


def talk_on(row: dict[str, Any]) -> None:
    """Asks for turns until one is refused, which it does not expect."""
    session, messages = client(), row["messages"]
    while True:
        answer = session.say(messages, max_tokens=1)
        messages = [*messages, answer, {"role": "user", "content": "1"}]
