"""A reward function that misbehaves as the response names it; workers have to survive it."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from typing import Any


def score(
    prompt: str, response: str, ground_truth: str, extra_info: dict[str, Any], scale: float = 1.0
) -> Any:
    """Do the action of ACTIONS that the response names, or compare it with the ground truth."""
    action = ACTIONS.get(response)
    if action is not None:
        return action()
    return scale * (response == ground_truth)


def hang() -> None:
    """Sleep, with two child processes that sleep too, one in a session of its own."""
    subprocess.Popen(["sleep", "4242"])
    subprocess.Popen(["sleep", "4242"], start_new_session=True)
    time.sleep(4242)


def hang_in_c() -> None:
    ctypes.PyDLL(None).sleep(4242)  # holds the interpreter's lock


def leave_a_process() -> float:
    """Return a score, but leave a child process that sleeps."""
    subprocess.Popen(["sleep", "4242"])
    return 1.0


def fail() -> None:
    raise ZeroDivisionError("of this reward")


def interrupt() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    signal.raise_signal(signal.SIGINT)


ACTIONS: dict[str, Any] = {
    "hang": hang,
    "hang in C": hang_in_c,
    "raise": fail,
    "interrupt": interrupt,
    "nan": lambda: float("nan"),
    "inf": lambda: {"score": float("-inf")},
    "none": lambda: None,
    "text": lambda: "1.0",
    "wrong length": lambda: [1.0, 0.0],
    "no score": lambda: {"accuracy": 1.0},
    "exit": lambda: sys.exit(3),
    "exit at once": lambda: os._exit(4),
    "crash": lambda: ctypes.string_at(0),
    "memory": lambda: len(bytearray(10 * 2**30)),
    "close": lambda: os.closerange(3, 65536),
    "leave a process": leave_a_process,
    "pause": lambda: time.sleep(0.5) or 1.0,
    "whisper": lambda: print("heard") or 1.0,
}


async def score_async(
    prompt: str, response: str, ground_truth: str, extra_info: dict[str, Any], data_source: str
) -> dict[str, float]:
    """Return a constant score with metrics, from a coroutine."""
    await asyncio.sleep(0)
    return {"score": 0.5, "length": len(response), "extra": extra_info.get("level", -1)}
