"""The agent `program`: a command or function of the user's, which talks to the session's endpoint.

def solve(row):                                   # rollout.program: solve.py:solve
    answer = OpenAI().chat.completions.create(model="policy", messages=row["messages"])
    return float(row["ground_truth"] in answer.choices[0].message.content)
"""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import Future
from typing import Any

from mindspeed_rlxf.agents import program_process
from mindspeed_rlxf.agents.gateway import open_endpoint
from mindspeed_rlxf.agents.program_process import ProgramPlan, ProgramRequest
from mindspeed_rlxf.agents.session import ConversationFailed, Session, ToolFailed, register_agent
from mindspeed_rlxf.config.plugins import find_carried
from mindspeed_rlxf.config.reward_section import split_name
from mindspeed_rlxf.config.rollout_section import PROGRAM_AGENT, ProgramConfig, RolloutConfig
from mindspeed_rlxf.rewards.outcome import ScoringBroken
from mindspeed_rlxf.rewards.workers import WorkerPool

PROGRAM_S = 7 * 24 * 3600.0  # longest time of a program; its session ends it long before
STARTED_S = 0.05  # between two looks whether a process has taken a program
UNLIMITED = -1  # address space, as of resource.RLIM_INFINITY


class _Opened:
    pool: WorkerPool | None = None


def open_programs(rollout: RolloutConfig) -> None:
    """Make this process's pool of programs; a former one is closed. Nothing starts yet."""
    close_programs()
    if rollout.program is None:
        return
    # A validation may lead conversations while those of training wait.
    size = 2 * rollout.program_processes
    _Opened.pool = WorkerPool(
        _make_plan(rollout.program),
        size,
        PROGRAM_S,
        UNLIMITED,
        program_process.main,
        dict,
    )


def close_programs() -> None:
    """Kill this process's programs."""
    if _Opened.pool is not None:
        _Opened.pool.close()
    _Opened.pool = None


def _make_plan(program: ProgramConfig) -> ProgramPlan:
    python_path = os.environ.get("PYTHONPATH")
    if program.sha256 is None:
        return ProgramPlan(None, program.run, program.folder, python_path)
    file_and_name = split_name(program.run)
    assert file_and_name is not None, "the driver has read the file"
    file, name = file_and_name
    return ProgramPlan(find_carried(file, program.sha256), name, None, python_path)


@register_agent(PROGRAM_AGENT, gives_first=True)
class ProgramAgent:
    """Runs `rollout.program` for each conversation, in a process of its own."""

    async def run(self, session: Session) -> None:
        """Lead one conversation."""
        pool = _Opened.pool
        if pool is None:
            raise RuntimeError("a run with the agent program must have rollout.program")
        async with open_endpoint(session) as endpoint:
            row = {
                "messages": endpoint.messages,
                "ground_truth": session.ground_truth,
                "extra_info": session.extra_info,
                "sample_id": session.sample_id,
            }
            request = ProgramRequest(row, endpoint.base_url, endpoint.api_key)
            reply = await _run(pool, request, session)
            if "message" in reply:
                raise ConversationFailed("program", reply["message"], reply.get("details", ""))
            if reply["score"] is not None:
                session.reward(reply["score"], **reply["parts"])


async def _run(pool: WorkerPool, request: ProgramRequest, session: Session) -> dict[str, Any]:
    """Run a program to its end; kill it if the conversation is given up."""
    future: Future[dict[str, Any]]
    try:
        future = pool.submit(request)
        ended = asyncio.wrap_future(future)
        try:
            while not (future.running() or future.done()):
                session.restart_clock()
                await asyncio.sleep(STARTED_S)
            return await ended
        finally:
            if not future.done() and not future.cancel():  # it runs
                # Finding what it has started takes a while.
                threading.Thread(target=pool.stop, args=[future], daemon=True).start()
    except ScoringBroken as error:
        raise ToolFailed(f"no process for a program: {error}") from None
