"""Run programs that lead conversations: `main` runs in a process started by `rewards.workers`."""

import asyncio
import ctypes
import inspect
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryFile
from typing import Any
from urllib.parse import urlsplit

import psutil

from mindspeed_rlxf.config.plugins import Source, run_as_module
from mindspeed_rlxf.config.reward_section import find_function
from mindspeed_rlxf.rewards.outcome import ScoreFailure, to_result
from mindspeed_rlxf.rewards.scoring import format_traceback, serve

KILL_S = 10.0  # for a killed process to end
MAX_OUTPUT = 4000  # characters of a failed command's stderr, the last ones


@dataclass(frozen=True)
class ProgramPlan:
    """Everything a process needs to run a program.

    Attributes:
        source: The file of a function; None = a command.
        run: Name of the function, or the command line.
        folder: Where a command runs.
        python_path: PYTHONPATH of a command; None = not set.
    """

    source: Source | None
    run: str
    folder: str | None
    python_path: str | None


@dataclass(frozen=True)
class ProgramRequest:
    """A conversation to lead.

    Attributes:
        row: What the program gets: messages, ground_truth, extra_info, sample_id.
        base_url: Of the session's endpoint.
        api_key: Its secret.
    """

    row: dict[str, Any]
    base_url: str
    api_key: str


def main() -> None:
    """Run programs until the parent closes the socket; each ends with all that it has started."""
    if sys.platform == "linux":
        # What a program leaves, in a session of its own too, becomes our child.
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    serve(make_runner)


def make_runner(plan: ProgramPlan) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a function from a `ProgramRequest` as a dict to {score, parts} or {message, details}.

    It runs the plan's file, whose exceptions it lets through.
    """
    if plan.source is None:
        run = partial(_run_command, plan)
    else:
        run = partial(_call, find_function(run_as_module(plan.source), plan.run))
    helpers = set(psutil.Process().children(recursive=True))  # that the file has started

    def run_to_the_end(request: dict[str, Any]) -> dict[str, Any]:
        try:
            return _hide(request["api_key"], run(**request))
        finally:
            _kill_children(helpers)

    return run_to_the_end


def _kill_children(spared: set[psutil.Process]) -> None:
    """Kill the child processes but `spared`; theirs become ours as they end, and follow."""
    this_process = psutil.Process()
    while children := set(this_process.children()) - spared:
        for child in children:
            with suppress(psutil.Error):
                child.kill()
        _, alive = psutil.wait_procs(children, KILL_S)
        if alive:  # another user's, or in a call of the kernel
            return


def _hide(secret: str, reply: dict[str, Any]) -> dict[str, Any]:
    """Replace a secret in the texts of a failure, which are logged."""
    texts = {
        name: text.replace(secret, "***") for name, text in reply.items() if isinstance(text, str)
    }
    return {**reply, **texts}


def _call(
    function: Callable[..., Any], row: dict[str, Any], base_url: str, api_key: str
) -> dict[str, Any]:
    os.environ.update(_client_variables(base_url, api_key))
    try:
        with _output_dropped():
            value = function(row)
            if inspect.iscoroutine(value):
                value = asyncio.run(value)
        result = to_result(value)
        parts = {n: part for n, part in result.parts.items() if not isinstance(part, str)}
        return {"score": result.score, "parts": parts}
    except ScoreFailure as failure:
        return {"message": failure.message}
    except BaseException as error:
        message = f"{type(error).__name__}: {error}"
        return {"message": message, "details": format_traceback(error)}


@contextmanager
def _output_dropped() -> Iterator[None]:
    """Drop what is printed: clients print addresses, which hold tokens."""
    kept = [os.dup(1), os.dup(2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        yield
    finally:
        for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            os.dup2(kept[number - 1], number)
        for descriptor in (*kept, nowhere):
            os.close(descriptor)


def _run_command(
    plan: ProgramPlan, row: dict[str, Any], base_url: str, api_key: str
) -> dict[str, Any]:
    """Run a command with the row as JSON on its standard input."""
    environment = {**os.environ, **_client_variables(base_url, api_key)}
    environment.pop("PYTHONPATH", None)
    if plan.python_path is not None:
        environment["PYTHONPATH"] = plan.python_path
    with TemporaryFile() as stderr:  # a pipe ends with the last process that the command starts
        try:
            ended = subprocess.run(
                shlex.split(plan.run),
                input=json.dumps(row, ensure_ascii=False).encode(),
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                cwd=plan.folder,
                env=environment,
                check=False,
                preexec_fn=_end_with_parent,
            )
        except OSError as error:
            return {"message": f"the command does not start: {error}"}
        if ended.returncode == 0:
            return {"score": None, "parts": {}}
        stderr.seek(max(0, stderr.tell() - 4 * MAX_OUTPUT))
        output = stderr.read().decode(errors="replace")[-MAX_OUTPUT:]
    return {"message": f"it ended with code {ended.returncode}", "details": output}


def _client_variables(base_url: str, api_key: str) -> dict[str, str]:
    """Return what OpenAI's clients read; they reach the gateway without a proxy."""
    listed = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    hosts = [*listed.split(","), urlsplit(base_url).hostname]
    direct = ",".join(dict.fromkeys(host for host in hosts if host))
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": api_key,
        "NO_PROXY": direct,
        "no_proxy": direct,
    }


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
