"""An environment of verifiers as a program: its harness asks the policy, its rewards score.

    python examples/agent/verifiers_program.py TASKSET rows.jsonl     # makes the rows
    rollout.program: examples/agent/verifiers_program.py:play

TASKSET is an installed package of the API `verifiers.v1`. The harness is its plain chat program,
which runs as a local process. A row has the messages that this program sends first.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any


def make_environment(taskset: str) -> Any:
    """Return the environment in which one agent plays a taskset."""
    import verifiers.v1 as vf

    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    fields = {"taskset": {"id": taskset}, "agent": agent}
    return vf.load_environment(vf.SingleAgentEnvConfig.model_validate(fields))


async def play(row: dict[str, Any]) -> float:
    """Play a row's task, and return its reward."""
    import verifiers.v1 as vf

    columns = row["extra_info"]
    environment = make_environment(columns["taskset"])
    [task] = environment.taskset.include(idx=[str(columns["task"])])
    base_url = os.environ["OPENAI_BASE_URL"]
    client = vf.EvalClientConfig(base_url=base_url, api_key_var="OPENAI_API_KEY")
    async with environment.serving():
        episode = await environment.run_episode(task, vf.ModelContext("policy", client))
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors))
    return float(sum(trace.reward for trace in episode.traces))


def write_rows(taskset: str, path: Path) -> None:
    """Write a row for each task."""
    with path.open("w", encoding="utf-8") as file:
        for task in make_environment(taskset).taskset:
            data = task.data
            given = {"system": data.system_prompt, "user": data.prompt}
            prompt = [{"role": role, "content": text} for role, text in given.items() if text]
            row = {"prompt": prompt, "data_source": taskset, "answer": ""}
            file.write(json.dumps({**row, "taskset": taskset, "task": data.idx}) + "\n")


if __name__ == "__main__":
    write_rows(sys.argv[1], Path(sys.argv[2]))
