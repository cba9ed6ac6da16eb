"""Score samples by the configured functions, or by their data sources' rules.

`main` runs in a process started by `workers`, which sets deadlines and kills it; `serve` answers
other requests there too.
"""

import asyncio
import contextlib
import ctypes
import inspect
import json
import os
import pickle
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from mindspeed_rlxf.config import plugins
from mindspeed_rlxf.config.plugins import Source, run_as_module
from mindspeed_rlxf.config.reward_section import (
    BY_SOURCE,
    RULES_OF_PROGRAMS,
    STRUCTURED,
    Adapter,
    FunctionConfig,
    SandboxConfig,
    find_adapter,
    find_function,
    keywords_of,
    split_name,
)
from mindspeed_rlxf.rewards.outcome import Cause, Sample, ScoreFailure, ScoringBroken, to_result
from mindspeed_rlxf.rewards.rules import RULES, RewardResult, arguments_of

MAX_TRACEBACK = 4000  # characters, the last ones


@dataclass(frozen=True)
class Plan:
    """Everything a scoring process needs.

    Attributes:
        functions: Reward functions with their files; None = `function` names a rule.
        rules: Data source -> rule name.
        plugins: Files that register plugin rules.
        defaults: Whether the data source's rule scores a sample that no function applies to.
        sandbox: None if no rule runs programs.
        adapters: Those of this process. A process that reads the plan imports their modules, which
            register them there.
    """

    functions: tuple[tuple[FunctionConfig, Source | None], ...]
    rules: dict[str, str]
    plugins: tuple[Source, ...] = ()
    defaults: bool = True
    sandbox: SandboxConfig | None = None
    adapters: tuple[Adapter, ...] = ()


class SampleScorer:
    """Scores samples by a plan; runs the plan's files and lets their exceptions through."""

    def __init__(self, plan: Plan) -> None:
        for plugin in plan.plugins:
            plugins.load(plugin)
        self._plan = plan
        self.function = ""  # the function or rule that scores now, for failures
        self._functions: list[tuple[FunctionConfig, Callable[..., Any] | None]] = []  # None = rule
        for config, source in plan.functions:
            file_and_name = split_name(config.function or "")
            function = None
            if source and file_and_name:
                function = find_function(run_as_module(source), file_and_name[1])
                adapter = find_adapter(function)
                if adapter is not None:
                    function = adapter.adapt(function, config.arguments)
            self._functions.append((config, function))

    def score(self, sample: Sample) -> RewardResult:
        """Score by the functions that apply to the data source, else by its rule."""
        results = []
        for config, function in self._functions:
            if not config.applies_to(sample.data_source):
                continue
            self.function = config.function or BY_SOURCE
            if function is None:
                result = self._apply_rule(config.function or BY_SOURCE, sample, config.arguments)
            else:
                inputs = {name: getattr(sample, name) for name in keywords_of(function)}
                inputs["ground_truth"] = sample.extra_info.get(STRUCTURED, sample.ground_truth)
                score = function(**inputs, **config.arguments)
                if inspect.iscoroutine(score):
                    score = asyncio.run(score)
                result = to_result(score)
            results.append((config.name, config.weight, result))
        return weighted_sum(results) if results else self._apply_rule(BY_SOURCE, sample, {})

    def _apply_rule(self, rule: str, sample: Sample, arguments: dict[str, Any]) -> RewardResult:
        if rule == BY_SOURCE:
            rule = self._plan.rules[sample.data_source]
            arguments = {}
            self.function = rule
        if rule in RULES_OF_PROGRAMS and rule not in RULES:  # of a data source in the table
            from mindspeed_rlxf.rewards import programs  # noqa: F401  registers its rules
        arguments = {**arguments, **arguments_of(rule, sample.extra_info)}
        result = RULES[rule](sample.response, sample.ground_truth, **arguments)
        return to_result({**result.parts, "score": result.score})


def weighted_sum(results: Sequence[tuple[str, float, RewardResult]]) -> RewardResult:
    """Add up weighted scores from (name, weight, result) triples; 0 for none.

    A score None (not applicable) is left out, weight and all; the sum is None if every score is.
    The parts are each unweighted score under its name, and its own parts under `name/key`. A result
    without a name contributes its own parts unchanged.
    """
    parts: dict[str, float | str] = {}
    weighted_scores = []
    for name, weight, result in results:
        if result.score is not None:
            weighted_scores.append(weight * result.score)
        if name and result.score is not None:
            parts[name] = result.score
        for key, value in result.parts.items():
            parts[f"{name}/{key}" if name else key] = value
    none_applies = bool(results) and not weighted_scores
    return RewardResult(None if none_applies else sum(weighted_scores), parts)


def score_safely(scorer: SampleScorer, sample: Sample) -> dict[str, Any]:
    """Return {score, parts}, {cause, message, details} or, if none can be scored, {error}.

    The details, if any, are the function, and the traceback of an exception.
    """
    try:
        result = scorer.score(sample)
        return {"score": result.score, "parts": result.parts}
    except ScoreFailure as failure:
        details = f"function: {scorer.function}"
        return {"cause": failure.cause.value, "message": failure.message, "details": details}
    except ScoringBroken as error:
        return {"error": str(error)[:1000]}
    except MemoryError:
        return {"cause": Cause.MEMORY.value, "message": "MemoryError"}
    except SystemExit as error:
        return {"cause": Cause.EXIT.value, "message": f"sys.exit({error.code!r:.60})"}
    except BaseException as error:
        message = f"{type(error).__name__}: {error}"[:300]
        details = f"function: {scorer.function}\n{format_traceback(error)}"
        return {"cause": Cause.EXCEPTION.value, "message": message, "details": details}


def format_traceback(error: BaseException) -> str:
    """Return the end of an exception's traceback, from the function that this file called."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    lines = traceback.format_exception(type(error), error, frames)
    return "".join(lines).rstrip()[-MAX_TRACEBACK:]


def main() -> None:
    """Score samples until the parent closes the socket."""
    serve(_make_scorer)


def _make_scorer(plan: Plan) -> Callable[[dict[str, Any]], dict[str, Any]]:
    if plan.sandbox is not None:
        from mindspeed_rlxf.rewards import programs  # half of the time to start

        programs.SHARED.use(plan.sandbox)
    scorer = SampleScorer(plan)
    return lambda request: score_safely(scorer, Sample(**request))


def serve(make_handler: Callable[[Any], Callable[[dict[str, Any]], dict[str, Any]]]) -> None:
    """Read a plan, make a handler of it, and answer requests until the parent closes the socket.

    Messages are bytes: the pickled plan, then JSON. The program arguments are the socket
    descriptor, the parent's process id, and the address space limit in bytes, -1 for none.
    """
    descriptor, parent, memory = map(int, sys.argv[1:])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        sys.exit("the parent process was ended before this one began")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    os.set_inheritable(descriptor, False)
    channel = Connection(descriptor)
    try:
        handler = make_handler(pickle.loads(channel.recv_bytes()))
        reply = "{}"
    except BaseException as error:
        channel.send_bytes(
            json.dumps({"error": f"{type(error).__name__}: {error}"[:1000]}).encode()
        )
        raise
    with contextlib.suppress(EOFError):
        while True:
            channel.send_bytes(reply.encode())
            reply = json.dumps(handler(json.loads(channel.recv_bytes())))
