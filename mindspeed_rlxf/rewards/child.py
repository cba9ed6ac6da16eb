"""Main function of a scoring process: it scores one sample at a time.

Samples and replies are lines of JSON over a socket; the plan comes on standard input. It runs the
code of the user; `workers` starts it, sets deadlines and kills it.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import sys
from typing import Any

from mindspeed_rlxf.rewards.outcome import Cause, Sample
from mindspeed_rlxf.rewards.scorer import Plan, SampleScorer, score_safely

PR_SET_PDEATHSIG = 1


def main(descriptor: int, parent: int, memory: int) -> None:
    """Read a plan from standard input, then score samples until the parent closes the socket.

    Samples and results are lines of JSON on the socket; the first line sent is an object with
    `ready`, or with `error` if the plan cannot be used; such an error is also raised. Limits this
    process's address space and turns off core dumps. Returns early after a sample that ran out of
    memory, or when no sample can be scored.

    descriptor: the socket
    parent:     id of the parent process; on Linux this one is killed when the thread that started
                it ends. Raises SystemExit if the parent has ended already
    memory:     bytes of address space
    """
    _die_with(parent)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    os.set_inheritable(descriptor, False)
    channel = socket.socket(fileno=descriptor)
    lines = channel.makefile("rb")
    try:
        plan = Plan.from_plain(_read_plan())
        sandbox = _open_sandbox(plan.sandbox) if plan.sandbox is not None else ""
        scorer = SampleScorer(plan)
    except BaseException as error:
        _send(channel, {"error": f"{type(error).__name__}: {error}"[:1000]})
        raise
    _send(channel, {"ready": True, "sandbox": sandbox})
    for line in lines:
        reply = score_safely(scorer, Sample(**json.loads(line)))
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        _send(channel, reply)
        if "error" in reply or reply.get("cause") == Cause.MEMORY.value:
            return  # what filled the memory may still be there


def _read_plan() -> dict[str, Any]:
    """Read the plan, a JSON object, from standard input to its end."""
    plan: dict[str, Any] = json.load(sys.stdin.buffer)
    return plan


def _open_sandbox(keys: dict[str, Any]) -> str:
    """Choose this process's sandbox for programs; return a line on its level of isolation.

    keys: those of reward.sandbox. Raises UserError if no level of isolation works here.
    Also registers the rules that run programs: importing them here spares other processes half of
    their time to start.
    """
    from mindspeed_rlxf.config.sandbox import SandboxConfig
    from mindspeed_rlxf.rewards import programs

    return programs.SHARED.use(SandboxConfig.model_validate(keys))


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the process that scores was ended before this one began")


def _send(channel: socket.socket, reply: dict[str, Any]) -> None:
    channel.sendall(json.dumps(reply).encode() + b"\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
