"""Tools that tests give to models; some misbehave."""

import asyncio
import os
import subprocess
import sys
import time


def add(a: float, b: float) -> float:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def look_up(key: str, *, table: dict[str, str]) -> str:
    """Look up a word.

    Args:
        key: The word.
        table: What a row knows.
    """
    return table[key]


async def wait(seconds: float) -> dict[str, float]:
    """Wait.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return {"waited": seconds}


def misbehave(how: str) -> str:
    """Do what a tool must not do.

    Args:
        how: What to do.
    """
    if how == "raise":
        raise ZeroDivisionError("of this tool")
    if how == "hang":
        subprocess.Popen(["sleep", "4242"])
        time.sleep(4242)
    if how == "exit":
        sys.exit(3)
    if how == "crash":
        os.abort()
    return how


def undocumented(key: str) -> str:
    return key
