"""Plan how samples are scored, check the plan, and score while others are generated."""

import inspect
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeAlias

from mindspeed_rlxf.config.enums import RewardKind
from mindspeed_rlxf.config.plugins import find_carried, loaded
from mindspeed_rlxf.config.problems import Problem, closest
from mindspeed_rlxf.config.reward_section import ADAPTERS, BY_SOURCE, FunctionConfig, split_name
from mindspeed_rlxf.config.schema import RewardConfig
from mindspeed_rlxf.data.prompt_store import reward_style
from mindspeed_rlxf.rewards.outcome import Cause, Outcome, Sample
from mindspeed_rlxf.rewards.remote import RemoteRewards
from mindspeed_rlxf.rewards.rules import (
    BUILTIN_SOURCES,
    OWN_RULES,
    RULES,
    SLOW_RULES,
    RewardResult,
)
from mindspeed_rlxf.rewards.scoring import Plan, weighted_sum
from mindspeed_rlxf.rewards.workers import WorkerPool


def make_plan(reward: RewardConfig) -> Plan:
    """Make the scoring processes' plan; servers run the functions with a url."""
    rules = BUILTIN_SOURCES | dict(reward.rules)
    functions = []
    rule_names = {*rules.values()}
    for function in reward.scoring_functions:
        if function.function is None:  # a server runs it
            continue
        source = None
        file_and_name = split_name(function.function)
        if file_and_name is not None:
            assert function.sha256 is not None, "the driver has read the file"
            source = find_carried(file_and_name[0], function.sha256)
        else:
            rule_names.add(function.function)
        functions.append((function, source))
    plugins = loaded() if rule_names - OWN_RULES - {BY_SOURCE} else ()
    sandbox = reward.sandbox if reward.runs_programs else None
    # With a reward model and no functions, the rules score validation samples.
    by_default = reward.kind is RewardKind.RULE or not reward.scoring_functions
    return Plan(tuple(functions), rules, plugins, by_default, sandbox, tuple(ADAPTERS))


def scores_row(reward: RewardConfig, extra_info: Mapping[str, Any]) -> bool:
    """Whether rules or functions score a row in training, alone or beside the model."""
    if reward.kind is RewardKind.RULE:
        return True
    style = reward_style(extra_info) if reward.chooses_by_label else None
    return style == "rule" or (style is None and bool(reward.scoring_functions))


def needs_processes(reward: RewardConfig, data_sources: Collection[str]) -> bool:
    """Whether functions or slow rules score samples from these data sources."""
    if reward.scoring_functions:
        return True
    if reward.verifier:
        return False
    rules = BUILTIN_SOURCES | dict(reward.rules)
    return any(rules.get(source) in SLOW_RULES for source in data_sources)


def rule_decides(reward: RewardConfig, data_source: str, style: str | None = None) -> bool:
    """Whether the data source's rule scores its samples, alone or with reward functions.

    With a reward model alone it scores validation samples.
    """
    functions = [
        function for function in reward.scoring_functions if function.applies_to(data_source)
    ]
    if not functions:
        return style == "rule" or reward.kind is RewardKind.RULE or not reward.scoring_functions
    return any(function.function == BY_SOURCE for function in functions)


def check_functions(reward: RewardConfig) -> Iterator[Problem]:
    """Yield a problem for each rule name that is unknown or refuses its arguments."""
    for config in reward.scoring_functions:
        name = config.function
        if name is None or split_name(name) or name == BY_SOURCE:
            continue
        is_single = reward.function is not None
        key = "reward.function" if is_single else f"reward.functions.{config.name}"
        if name not in RULES:
            rule_names = [BY_SOURCE, *sorted(RULES)]
            guess = closest(name, rule_names) or "path/to/file.py:name"
            rule = f"must be path/to/file.py:name, or one of {', '.join(rule_names)}"
            yield Problem(key, rule, name, f"use {guess}")
            continue
        try:
            inspect.signature(RULES[name]).bind("", "", **config.arguments)
            if name in OWN_RULES - SLOW_RULES:  # fast enough to try
                RULES[name]("A", "A", **config.arguments)
        except (TypeError, ValueError, re.error) as error:
            rule = f"the rule {name} must take its arguments: {error}"
            yield Problem(key, rule, dict(config.arguments), "correct them", colon=True)


Scoring: TypeAlias = list[tuple[str, float, Future[Outcome]]]
"""The scoring of a sample, in progress: (name, weight, outcome) of each server that scores it.

At the end that of this host's processes, if they do: without a name, as it is a weighted sum.
"""


def join_scoring(scoring: Scoring, beside_model: bool = False) -> Outcome:
    """Wait for all outcomes; return their weighted sum (0 if empty), or a failure.

    If each function says None (not applicable), the sum is 0 for a row that a model scores too
    (`beside_model`), else a failure: then nothing scores the sample.

    Raises:
        ScoringBroken: The scoring processes cannot score any sample.
    """
    results = []
    failure: Outcome | None = None  # the last one
    for name, weight, future in scoring:
        outcome = future.result()
        if outcome.result is None:
            failure = outcome
        else:
            results.append((name, weight, outcome.result))
    if failure is not None:
        return failure
    total = weighted_sum(results)
    if total.score is None and not beside_model:
        return Outcome(None, Cause.WRONG_RESULT, "no score: all that score it returned None")
    return Outcome(RewardResult(total.score or 0.0, total.parts))


def save_scoring(scoring: Scoring) -> list[Any] | None:
    """Return the outcomes in JSON types; None if one is not there yet, or scoring is broken."""
    saved = []
    for name, weight, future in scoring:
        if not future.done() or future.exception() is not None:
            return None
        saved.append([name, weight, future.result().to_json()])
    return saved


def restore_scoring(saved: Sequence[Any]) -> Scoring:
    """Return the scoring that `save_scoring` has saved."""
    scoring: Scoring = []
    for name, weight, outcome in saved:
        future: Future[Outcome] = Future()
        future.set_result(Outcome.from_json(outcome))
        scoring.append((name, weight, future))
    return scoring


class StreamingRewards:
    """Scores samples by configured functions, rules and servers, in the background."""

    def __init__(self, reward: RewardConfig) -> None:
        self._plan = make_plan(reward)
        memory = int(reward.worker_memory_gib * 2**30)
        self._pool = WorkerPool(self._plan, reward.processes, reward.timeout_s, memory)
        self._servers: list[tuple[FunctionConfig, RemoteRewards]] = []
        for config in reward.scoring_functions:
            if config.url is not None:
                server = RemoteRewards(
                    config.url, config.headers, config.batch_size, reward.timeout_s
                )
                self._servers.append((config, server))

    def submit(self, sample: Sample) -> Scoring:
        """Start scoring by the functions and servers that apply to the data source.

        If none applies, the data source's rule scores the sample, given the plan's `defaults` or
        the label `rule`; else its score is 0.
        """
        source = sample.data_source
        scoring: Scoring = []
        for config, server in self._servers:
            if config.applies_to(source):
                scoring.append((config.name, config.weight, server.submit(sample)))
        runs_here = any(config.applies_to(source) for config, _ in self._plan.functions)
        by_label = reward_style(sample.extra_info) == "rule"
        if runs_here or (not scoring and (self._plan.defaults or by_label)):
            scoring.append(("", 1.0, self._pool.submit(sample)))
        return scoring
